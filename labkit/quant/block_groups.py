"""ggml's blocks as codes, scales and minima: the common tongue (``grid.Groups``) that kernels pack from.

Q4_0, Q5_0, Q8_0, Q6_K    w = s (q - 2^(bits - 1))        Q4_1, Q5_1, Q4_K, Q5_K    w = s q + m
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from labkit.quant.blocks import BLOCKS
from labkit.quant.bytes import bits_of, bytes_of, columns, half, joined, tensor_of
from labkit.quant.grid import Groups
from labkit.quant.k_quants import codes_of_q4, codes_of_q5, codes_of_q6, scales_and_minima, scales_of_q6


def groups(raw: Tensor, kind: str, n_in: int) -> Groups:
    """raw uint8 (N, bytes of a row) -> ``Groups``: scales and minima exact, float16 as a block has them or, products of
    two numbers, float32. Raises ValueError for a format that has no such form (Q2_K, Q3_K)."""
    if kind not in _PARTS:
        raise ValueError(f"{kind} has no form of codes, scales and minima here: {', '.join(_PARTS)} have.")
    n_out = len(raw)
    bits, codes, scales, minima = _PARTS[kind](bytes_of(raw.contiguous().view(-1, BLOCKS[kind][1])))

    def rows(t: Any) -> Tensor:
        return tensor_of(t.reshape(n_out, -1))

    return Groups(bits, rows(codes), rows(scales), None, None if minima is None else rows(minima))


def has(kind: str) -> bool:
    """Whether blocks of this format have the form."""
    return kind in _PARTS


def _low(blocks: Any, column: int) -> Any:
    packed = columns(blocks, column, column + 16)
    return joined(packed & 15, packed >> 4)


def _fifth(blocks: Any, column: int) -> Any:
    return bits_of(columns(blocks, column, column + 4)) << 4  # little-endian: input 8 byte + bit


Parts = tuple[int, Any, Any, Any]


def _q4_0(b: Any) -> Parts:
    return 4, _low(b, 2), half(b, 0), None


def _q4_1(b: Any) -> Parts:
    return 4, _low(b, 4), half(b, 0), half(b, 2)


def _q5_0(b: Any) -> Parts:
    return 5, _low(b, 6) | _fifth(b, 2), half(b, 0), None


def _q5_1(b: Any) -> Parts:
    return 5, _low(b, 8) | _fifth(b, 4), half(b, 0), half(b, 2)


def _q8_0(b: Any) -> Parts:
    return 8, columns(b, 2, 34) ^ 128, half(b, 0), None  # two's complement + 128


def _q4_k(b: Any) -> Parts:
    return 4, codes_of_q4(b), *scales_and_minima(b)


def _q5_k(b: Any) -> Parts:
    return 5, codes_of_q5(b), *scales_and_minima(b)


def _q6_k(b: Any) -> Parts:
    return 6, codes_of_q6(b), scales_of_q6(b), None


_PARTS: dict[str, Callable[[Any], Parts]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}  # fmt: skip

SIZES: dict[str, tuple[int, int, int]] = {
    "Q4_0": (4, 32, 2), "Q4_1": (4, 32, 4), "Q5_0": (5, 32, 2), "Q5_1": (5, 32, 4), "Q8_0": (8, 32, 2),
    "Q4_K": (4, 32, 8), "Q5_K": (5, 32, 8), "Q6_K": (6, 16, 4),
}  # fmt: skip
"""Bits of a code, inputs of a group, and bytes of a group's scale and minimum as panels hold them: float32 where they
are products, which float16 does not hold."""
