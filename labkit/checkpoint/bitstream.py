"""Integers of 2 to 8 bits in words of 32, low bits first and dense: the layout that GPTQ and compressed-tensors share.

Value i of a row stands in bits i b to i b + b - 1 of the row's stream; one that a word's end cuts goes on in the next.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_ROWS = 2**16
"""Values whose bits are spread out at once: what is in between takes a byte a bit."""


def n_words(n_values: int, bits: int) -> int:
    """Words that a row takes.

    >>> n_words(576, 3), n_words(10, 4)
    (54, 2)
    """
    return -(-n_values * bits // 32)


def pack(values: Tensor, bits: int) -> Tensor:
    """values uint8 (R, n) below 2^bits -> int32 (R, ``n_words``)."""
    rows, n = values.shape
    words = n_words(n, bits)
    out = np.empty((rows, words), np.int32)
    weights = np.arange(bits, dtype=np.uint8)
    step = max(1, _ROWS // max(1, n))
    for at in range(0, rows, step):
        part = values[at : at + step].numpy()
        spread = np.zeros((len(part), words * 32), np.uint8)
        spread[:, : n * bits] = ((part[:, :, None] >> weights) & 1).reshape(len(part), -1)
        out[at : at + step] = np.packbits(spread, axis=1, bitorder="little").view("<i4")
    return torch.from_numpy(out)


def unpack(words: Tensor, bits: int, n_values: int) -> Tensor:
    """The inverse: int32 (R, ``n_words``) -> uint8 (R, n_values)."""
    source = np.ascontiguousarray(words.numpy()).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return torch.from_numpy(source[:, :n_values].copy())
    if bits == 4:
        pairs = np.stack((source & 15, source >> 4), axis=-1).reshape(len(source), -1)
        return torch.from_numpy(np.ascontiguousarray(pairs[:, :n_values]))
    out = np.empty((len(source), n_values), np.uint8)
    powers = (1 << np.arange(bits)).astype(np.uint8)
    step = max(1, _ROWS // max(1, n_values))
    for at in range(0, len(source), step):
        spread = np.unpackbits(source[at : at + step], axis=1, bitorder="little", count=n_values * bits)
        out[at : at + step] = spread.reshape(-1, n_values, bits) @ powers
    return torch.from_numpy(out)
