"""ggml's block formats to plain tensors.

A row is cut into blocks of 32 values, each with its own scale (and minimum), stored as ``scale, [min], bits``:

    Q4_0, Q5_0, Q8_0    w = d q             (q signed)
    Q4_1, Q5_1          w = d q + m         (q unsigned)

Low nibbles are the first half of a block, high nibbles the second. K-quants (blocks of 256 with scales of
scales) are left to the ``gguf`` package.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

CHUNK_VALUES = 31 * 1024
"""Values dequantised at once: the working set stays in the processor's cache, and just under torch's grain of
32,768, below which it starts no threads. On a busy machine their barrier costs 50 times what they compute."""

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK = 32


@cache
def _layouts() -> dict[int, tuple[str, int, int]]:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {*_FLOATS, "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
    kinds = (kind for kind in GGMLQuantizationType if kind.name in known)
    return {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in kinds}


def block_layout(code: int) -> tuple[str, int, int]:
    """Name, values a block and bytes a block of ggml's format number ``code``; ("", 1, 1) when unknown."""
    return _layouts().get(code, ("", 1, 1))


def dequantize(raw: Tensor, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The bytes ``raw`` (uint8) of format ``kind`` as a new tensor of ``shape`` in ``dtype``.

    Values are computed in float32 and rounded once, a chunk at a time, straight into the result.
    """
    if kind in _FLOATS:
        return raw.view(_FLOATS[kind]).reshape(shape).to(dtype, copy=True)
    out = torch.empty(shape, dtype=dtype)
    if kind not in _SIMPLE:
        _dequantize_k(raw, kind, out)
        return out
    blocks, flat = raw.view(-1, _SIMPLE_NBYTES[kind]), out.view(-1, BLOCK)
    step = CHUNK_VALUES // BLOCK
    for start in range(0, len(blocks), step):
        _SIMPLE[kind](blocks[start : start + step], flat[start : start + step])
    return out


def _half(blocks: Tensor, column: int) -> Tensor:
    """The float16 at byte ``column`` of each block, as float32 (n, 1)."""
    return blocks[:, column : column + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """16 bytes a block to 32 float32 values in 0..15."""
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
    out.copy_(q.sub_(8).mul_(_half(blocks, 0)))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    q = torch.empty(out.shape)
    _nibbles(blocks[:, 4:20], q)
    out.copy_(q.mul_(_half(blocks, 0)).add_(_half(blocks, 2)))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    q = torch.empty(out.shape)
    _nibbles(blocks[:, 6:22], q)
    out.copy_(q.add_(_fifth_bits(blocks, 2)).sub_(16).mul_(_half(blocks, 0)))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    q = torch.empty(out.shape)
    _nibbles(blocks[:, 8:24], q)
    out.copy_(q.add_(_fifth_bits(blocks, 4)).mul_(_half(blocks, 0)).add_(_half(blocks, 2)))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:34].view(torch.int8).float().mul_(_half(blocks, 0)))


_SIMPLE: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
}
_SIMPLE_NBYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}


def _dequantize_k(raw: Tensor, kind: str, out: Tensor) -> None:
    import gguf

    code = gguf.GGMLQuantizationType[kind]
    block, block_nbytes = gguf.GGML_QUANT_SIZES[code]
    blocks, flat = raw.view(-1, block_nbytes), out.view(-1, block)
    step = CHUNK_VALUES // block
    for start in range(0, len(blocks), step):
        values = gguf.dequantize(blocks[start : start + step].numpy(), code)
        flat[start : start + step] = torch.from_numpy(values)
