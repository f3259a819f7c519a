"""Fewer bits a number: keys on one grid per channel, values on one per token (KIVI, arXiv 2402.02750).

Some key channels are large in every token, so a grid per channel fits them; values have no such channels, and a grid
per token can be written as soon as the token is there. A grid is a scale and a zero in bf16::

    x ~ scale * code + zero        int8: code -127 ... 127, zero the middle;   int4: code 0 ... 15, zero the lowest

The grid is rounded to bf16 *first*, outwards, and the codes are taken from the rounded one: nothing is clipped and
the error is at most half a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = {"int8": 8, "int4": 4}
_OUTWARDS = 2.0**-7
"""More than one bf16 rounding step (2^-8), relative."""


def make_grid(low: Tensor, high: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """scale and zero, bf16, for numbers between ``low`` and ``high`` (same shapes)."""
    low, high = low.float(), high.float()
    if kind == "int8":
        zero = ((low + high) / 2).bfloat16()
        step = torch.maximum(high - zero.float(), zero.float() - low) / 127
    else:
        zero = (low - low.abs() * _OUTWARDS).bfloat16()
        step = (high - zero.float()) / 15
    return (step * (1 + _OUTWARDS)).clamp(min=1e-20).bfloat16(), zero


def encode(x: Tensor, scale: Tensor, zero: Tensor, kind: str) -> Tensor:
    """Codes of x on a grid that broadcasts against it: int8, or uint8 with one code (0 ... 15) a byte."""
    codes = torch.round((x.float() - zero.float()) / scale.float())
    if kind == "int8":
        return codes.clamp(-127, 127).to(torch.int8)
    return codes.clamp(0, 15).to(torch.uint8)


def pack(codes: Tensor) -> Tensor:
    """Two int4 codes a byte along the last dim: the first half in the low nibbles, the second in the high ones.

    >>> pack(torch.tensor([1, 2, 3, 4], dtype=torch.uint8)).tolist()
    [49, 66]
    """
    low, high = codes.chunk(2, dim=-1)
    return low | (high << 4)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of ``pack``: (..., n) bytes to (..., 2 n) codes."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def quantize_keys(k: Tensor, group: int, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """k (..., S, D), S a multiple of ``group`` -> codes (..., S/group, D, group), scale and zero (..., S/group, D).

    The codes lie channel by channel; int4 packs two tokens a byte: (..., D, group/2)."""
    channels = k.unflatten(-2, (-1, group)).transpose(-1, -2)  # (..., S/group, D, group)
    scale, zero = make_grid(channels.amin(-1), channels.amax(-1), kind)
    codes = encode(channels, scale[..., None], zero[..., None], kind)
    return (pack(codes) if kind == "int4" else codes), scale, zero


def dequantize_keys(codes: Tensor, scale: Tensor, zero: Tensor, kind: str) -> Tensor:
    """The inverse, float32 (..., S, D)."""
    wide = (unpack(codes) if kind == "int4" else codes).float()
    return (wide * scale.float()[..., None] + zero.float()[..., None]).transpose(-1, -2).flatten(-3, -2)


def quantize_values(v: Tensor, group: int, n_grids: int, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """v (..., S, D) -> codes (..., S/group, group, D), scale and zero (..., S/group, n_grids, group).

    Each run of D / n_grids dims of a token has its own grid; int4 packs two dims a byte: (..., group, D/2)."""
    runs = v.unflatten(-2, (-1, group)).unflatten(-1, (n_grids, -1))  # (..., S/group, group, n_grids, D/n_grids)
    scale, zero = make_grid(runs.amin(-1), runs.amax(-1), kind)
    codes = encode(runs, scale[..., None], zero[..., None], kind).flatten(-2)
    return (pack(codes) if kind == "int4" else codes), scale.transpose(-1, -2), zero.transpose(-1, -2)


def dequantize_values(codes: Tensor, scale: Tensor, zero: Tensor, kind: str) -> Tensor:
    """The inverse, float32 (..., S, D)."""
    wide = (unpack(codes) if kind == "int4" else codes).float()
    runs = wide.unflatten(-1, (scale.shape[-2], -1))
    runs = runs * scale.float().transpose(-1, -2)[..., None] + zero.float().transpose(-1, -2)[..., None]
    return runs.flatten(-2).flatten(-3, -2)
