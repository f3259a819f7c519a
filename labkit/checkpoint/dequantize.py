"""ggml's block formats to plain tensors.

A row is cut into blocks of 32 values, each with its own scale (and minimum), stored as ``scale, [min], bits``:

    Q4_0, Q5_0, Q8_0    w = d q             (q signed)
    Q4_1, Q5_1          w = d q + m         (q unsigned)

Low nibbles are the first half of a block, high nibbles the second. K-quants stand in ``k_quants``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from labkit.checkpoint.k_quants import K_QUANTS, half

CHUNK_VALUES = 31 * 1024
"""Values dequantised at once: the working set stays in the processor's cache, and just under torch's grain of
32,768, below which it starts no threads. On a busy machine their barrier costs 50 times what they compute."""

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK = 32


_LAYOUTS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
"""ggml's number for each format: name, values a block, bytes a block."""


def block_layout(code: int) -> tuple[str, int, int]:
    """Name, values a block and bytes a block of ggml's format number ``code``; ("", 1, 1) when unknown."""
    return _LAYOUTS.get(code, ("", 1, 1))


def dequantize(raw: Tensor, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The bytes ``raw`` (uint8) of format ``kind`` as a new tensor of ``shape`` in ``dtype``.

    Values are computed in float32 and rounded once, a chunk at a time, straight into the result.
    """
    if kind in _FLOATS:
        return raw.view(_FLOATS[kind]).reshape(shape).to(dtype, copy=True)
    out = torch.empty(shape, dtype=dtype)
    values_a_block, bytes_a_block = next(sizes for name, *sizes in _LAYOUTS.values() if name == kind)
    blocks, flat = raw.view(-1, bytes_a_block), out.view(-1, values_a_block)
    step = CHUNK_VALUES // values_a_block
    for start in range(0, len(blocks), step):
        _FORMULAS[kind](blocks[start : start + step], flat[start : start + step])
    return out


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """16 bytes a block to 32 float32 values in 0..15."""
    packed = packed.contiguous()  # three times faster than masking 16 bytes here and 16 there
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _fifth_bits(blocks: Tensor, column: int) -> Tensor:
    """The 32 fifth bits of each block, little-endian in 4 bytes, as 0 or 16: (n, 32)."""
    spread = torch.arange(8, dtype=torch.uint8)
    bits = blocks[:, column : column + 4].unsqueeze(-1) >> spread & 1  # (n, 4, 8)
    return bits.reshape(-1, BLOCK) << 4


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    q = torch.empty(out.shape)
    _nibbles(blocks[:, 2:18], q)
    out.copy_(q.sub_(8).mul_(half(blocks, 0)))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    q = torch.empty(out.shape)
    _nibbles(blocks[:, 4:20], q)
    out.copy_(q.mul_(half(blocks, 0)).add_(half(blocks, 2)))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    q = torch.empty(out.shape)
    _nibbles(blocks[:, 6:22], q)
    out.copy_(q.add_(_fifth_bits(blocks, 2)).sub_(16).mul_(half(blocks, 0)))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    q = torch.empty(out.shape)
    _nibbles(blocks[:, 8:24], q)
    out.copy_(q.add_(_fifth_bits(blocks, 4)).mul_(half(blocks, 0)).add_(half(blocks, 2)))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:34].view(torch.int8).float().mul_(half(blocks, 0)))


_FORMULAS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    **K_QUANTS,
}
