"""ggml's block formats to plain tensors.

A row is cut into blocks of 32 values, each with its own scale (and minimum), stored as ``scale, [min], bits``:

    Q4_0, Q5_0, Q8_0    w = d q             (q signed)
    Q4_1, Q5_1          w = d q + m         (q unsigned)

Low nibbles are the first half of a block, high nibbles the second. K-quants stand in ``k_quants``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from labkit.quant.k_quants import K_QUANTS

CHUNK_VALUES = 128 * 1024
"""Values dequantised at once: few and long operations. Between two of them the compiling thread may take the
interpreter's lock, and keep it for a while."""
TORCH_CHUNK_VALUES = 31 * 1024
"""The same where torch computes: just under its grain of 32,768, below which it starts no threads. On a busy machine
their barrier costs 50 times what they compute."""

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

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


BLOCKS: dict[str, tuple[int, int]] = {name: (values, n_bytes) for name, values, n_bytes in _LAYOUTS.values()}
"""Name to values a block and bytes a block."""
NUMBERS = {name: number for number, (name, _, _) in _LAYOUTS.items()}
"""Name to ggml's number."""
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Bytes of a block at which a float16 stands: its scale, and its minimum where it has one."""
FORMATS = tuple(_HALVES)
"""The formats that pack: everything but plain numbers."""


def row_nbytes(kind: str, n_in: int) -> int:
    """Bytes of a row. Raises ValueError when its blocks do not divide ``n_in``.

    >>> row_nbytes("Q4_1", 576)
    360
    """
    values, n_bytes = BLOCKS[kind]
    if n_in % values:
        raise ValueError(f"{kind} packs {values} weights a block, which does not divide a layer's {n_in} inputs.")
    return n_in // values * n_bytes


def not_finite(raw: Tensor, kind: str) -> bool:
    """Whether a block's scale or minimum is NaN or infinite: only there can a packed weight be."""
    found = raw.view(-1, BLOCKS[kind][1]).numpy()
    exponents = (found[:, at + 1] & 0x7C for at in _HALVES[kind])
    return any(bool((exponent == 0x7C).any()) for exponent in exponents)


def anything(kind: str, n_out: int, n_in: int) -> Tensor:
    """Rows of the format (N, bytes of a row) with codes at random and scales that are finite."""
    generator = torch.Generator().manual_seed(n_out * 31 + n_in)
    raw = torch.randint(0, 256, (n_out, row_nbytes(kind, n_in)), dtype=torch.uint8, generator=generator)
    found = raw.view(-1, BLOCKS[kind][1])
    for at in _HALVES[kind]:
        found[:, at : at + 2] = torch.tensor([2**-9], dtype=torch.float16).view(torch.uint8)
    return raw


def dequantize(raw: Tensor, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The bytes ``raw`` (uint8) of format ``kind`` as a new tensor of ``shape`` in ``dtype``.

    Values are computed in float32 and rounded once, a chunk at a time, straight into the result.
    """
    if kind in _FLOATS:
        return raw.view(_FLOATS[kind]).reshape(shape).to(dtype, copy=True)
    out = torch.empty(shape, dtype=dtype)
    values_a_block, bytes_a_block = BLOCKS[kind]
    blocks, flat = raw.view(-1, bytes_a_block), out.view(-1, values_a_block)
    by_torch = kind in K_QUANTS or dtype != torch.float32
    step = (TORCH_CHUNK_VALUES if by_torch else CHUNK_VALUES) // values_a_block
    for start in range(0, len(blocks), step):
        _FORMULAS[kind](blocks[start : start + step], flat[start : start + step])
    return out


def _half(blocks: np.ndarray, column: int) -> np.ndarray:
    """The float16 at byte ``column`` of each block, as float32 (n, 1)."""
    return np.ascontiguousarray(blocks[:, column : column + 2]).view(np.float16).astype(np.float32)


def _nibbles(blocks: np.ndarray, column: int, out: np.ndarray) -> None:
    """16 bytes a block, from ``column`` on, to 32 float32 values in 0..15."""
    packed = np.ascontiguousarray(blocks[:, column : column + 16])
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _fifth_bits(blocks: np.ndarray, column: int) -> np.ndarray:
    """The 32 fifth bits of each block, little-endian in 4 bytes, as 0 or 16: (n, 32)."""
    bits = np.unpackbits(np.ascontiguousarray(blocks[:, column : column + 4]), axis=1, bitorder="little")
    return bits << 4


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks, 2, out)
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks, 4, out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks, 6, out)
    out += _fifth_bits(blocks, 2)
    out -= 16
    out *= _half(blocks, 0)


def _q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks, 8, out)
    out += _fifth_bits(blocks, 4)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(blocks[:, 2:34].view(np.int8), _half(blocks, 0), out=out)


def _in_numpy(formula: Callable[[np.ndarray, np.ndarray], None]) -> Callable[[Tensor, Tensor], None]:
    """A formula in numpy, on one thread."""

    def dequantize(blocks: Tensor, out: Tensor) -> None:
        if out.dtype == torch.float32:
            formula(blocks.numpy(), out.numpy())
            return
        values = np.empty(out.shape, np.float32)
        formula(blocks.numpy(), values)
        out.copy_(torch.from_numpy(values))

    return dequantize


_FORMULAS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _in_numpy(_q4_0),
    "Q4_1": _in_numpy(_q4_1),
    "Q5_0": _in_numpy(_q5_0),
    "Q5_1": _in_numpy(_q5_1),
    "Q8_0": _in_numpy(_q8_0),
    **K_QUANTS,
}
