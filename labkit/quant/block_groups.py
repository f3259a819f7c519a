"""ggml's blocks as codes, scales and minima: the common tongue (``grid.Groups``) that kernels pack from.

Q4_0, Q5_0, Q8_0, Q6_K    w = s (q - 2^(bits - 1))        Q4_1, Q5_1, Q4_K, Q5_K    w = s q + m
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from labkit.quant.blocks import BLOCKS
from labkit.quant.grid import Groups
from labkit.quant.k_quants import codes_of_q6, half, nibbles, scales_and_minima


def groups(raw: Tensor, kind: str, n_in: int) -> Groups:
    """raw uint8 (N, bytes of a row) -> ``Groups``: scales and minima float32, exact. Raises ValueError for a format
    that has no such form (Q2_K, Q3_K)."""
    if kind not in _PARTS:
        raise ValueError(f"{kind} has no form of codes, scales and minima here: {', '.join(_PARTS)} have.")
    n_out = len(raw)
    bits, codes, scales, minima = _PARTS[kind](raw.contiguous().view(-1, BLOCKS[kind][1]))

    def rows(t: Tensor) -> Tensor:
        return t.reshape(n_out, -1)

    return Groups(bits, rows(codes), rows(scales), None, None if minima is None else rows(minima))


def has(kind: str) -> bool:
    """Whether blocks of this format have the form."""
    return kind in _PARTS


def _low(blocks: Tensor, column: int) -> Tensor:
    packed = blocks[:, column : column + 16]
    return torch.cat([packed & 15, packed >> 4], dim=1)


def _fifth(blocks: Tensor, column: int) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[:, column : column + 4, None] >> shifts & 1) << 4).flatten(1)  # little-endian: input 8 byte + bit


Parts = tuple[int, Tensor, Tensor, Tensor | None]


def _q4_0(b: Tensor) -> Parts:
    return 4, _low(b, 2), half(b, 0), None


def _q4_1(b: Tensor) -> Parts:
    return 4, _low(b, 4), half(b, 0), half(b, 2)


def _q5_0(b: Tensor) -> Parts:
    return 5, _low(b, 6) | _fifth(b, 2), half(b, 0), None


def _q5_1(b: Tensor) -> Parts:
    return 5, _low(b, 8) | _fifth(b, 4), half(b, 0), half(b, 2)


def _q8_0(b: Tensor) -> Parts:
    return 8, b[:, 2:34] ^ 128, half(b, 0), None  # two's complement + 128


def _q4_k(b: Tensor) -> Parts:
    return 4, nibbles(b[:, 16:144]), *scales_and_minima(b)


def _q5_k(b: Tensor) -> Parts:
    shifts = torch.arange(8, dtype=torch.uint8, device=b.device).unsqueeze(-1)
    fifth = (b[:, 16:48].unsqueeze(1) >> shifts & 1) << 4
    return 5, nibbles(b[:, 48:176]) | fifth, *scales_and_minima(b)


def _q6_k(b: Tensor) -> Parts:
    return 6, codes_of_q6(b), half(b, 208) * b[:, 192:208].view(torch.int8).float(), None


_PARTS: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}  # fmt: skip
