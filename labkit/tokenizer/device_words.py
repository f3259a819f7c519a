"""Unique words on the device, by hash, and never trusted to the hash alone: every word is compared with the one it
stands for."""

from __future__ import annotations

import torch
from torch import Tensor

_BASE = -7046029254386353131  # odd, so it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 1 << 64) - (1 << 64 if pow(_BASE, -1, 1 << 64) >= 1 << 63 else 0)


def hash_words(data: Tensor, starts: Tensor, stops: Tensor) -> Tensor:
    """A 64-bit hash of each word, int64 (n_words,): the polynomial sum((byte + 1) * BASE^k) modulo 2^64, mixed.

    All words are hashed from one prefix sum: P[stop] - P[start] is the polynomial times BASE^start.
    """
    n = len(data)
    weighted = (data.long() + 1) * _powers(_BASE, n, data.device)
    prefix = torch.cat([weighted.new_zeros(1), torch.cumsum(weighted, 0)])
    value = (prefix[stops] - prefix[starts]) * _powers(_INVERSE, n, data.device)[starts]
    value = value ^ ((stops - starts) * 0x9E3779B97F4A7C)
    value = value * -4658895280553007687
    return value ^ (value >> 29)


def _powers(base: int, n: int, device: torch.device) -> Tensor:
    """base^0 .. base^(n-1) modulo 2^64."""
    powers = torch.full((n,), base, dtype=torch.int64, device=device)
    powers[:1] = 1
    return torch.cumprod(powers, 0)


def unique_words(data: Tensor, starts: Tensor, stops: Tensor) -> tuple[Tensor, Tensor]:
    """(index of the first word of each kind, int64 (n_unique,); the kind of each word, int64 (n_words,)).

    Raises RuntimeError if two different words ever shared a hash; the caller then encodes without this step.
    """
    values, kind = torch.unique(hash_words(data, starts, stops), return_inverse=True)
    n_words = len(starts)
    first = torch.full((len(values),), n_words, dtype=torch.int64, device=data.device)
    first.scatter_reduce_(0, kind, torch.arange(n_words, device=data.device), "amin")
    same = same_bytes(data, starts, stops, data, starts[first][kind], stops[first][kind])
    if not bool(same.all()):
        raise RuntimeError("two different words have the same 64-bit hash")
    return first, kind


def same_bytes(data: Tensor, starts: Tensor, stops: Tensor, other: Tensor, o_starts: Tensor, o_stops: Tensor) -> Tensor:
    """Whether word i of `data` equals word i of `other`, bool (n_words,)."""
    lengths = stops - starts
    same = lengths == o_stops - o_starts
    lengths = torch.where(same, lengths, 0)
    word = torch.repeat_interleave(torch.arange(len(starts), device=data.device), lengths)
    offset = torch.arange(len(word), device=data.device) - (torch.cumsum(lengths, 0) - lengths)[word]
    differs = data[starts[word] + offset] != other[o_starts[word] + offset]
    same[word[differs]] = False
    return same
