# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""A layer's stored keys and values as panels, made once for all the tokens of a prompt that meet them.

A tile of TILE keys of one group lies together, at ``tile_at``. As float32:

    keys    (8, D, 16)        sixteen keys to a panel, one number of each beside the other
    values  (D' / 16, TILE, 16)     sixteen channels to a panel, one key's after the other's; D' = D made whole sixteens

As int16, two to a word, of the numbers that are multiplied and summed up, with what one of each key's stands for:

    keys    (8, D' / 2, 16, 2)            steps (TILE,) float32
    values  (D' / 16, TILE / 2, 16, 2)    log(steps), 1 / steps (TILE,)

A value's step belongs to its weight: its logarithm is added to the score, so that the weights that are rounded are as
large as what they add (a key that draws much attention to a small value leaves room for others). A step is a key's
own: how a prompt is cut into runs does not show. A query or a tile's weights have 2^LEVELS steps, and these as many as
an int32 holds for the sum of that many products: bf16 keeps 8 bits of a number, 64 or 128 of these 12 or 11 of their
largest.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray

from labkit.kernels.cpu import panels, rounding, rowwise
from labkit.kernels.cpu.blocks import copy, fill, floats
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.memory import ROWS, TILE, WORD, tile_bytes, whole
from labkit.kernels.cpu.plan import (
    BF16,
    CACHE_FORMAT,
    D_HEAD,
    HEAD_STRIDE,
    K_CACHE,
    N_KV,
    N_SINKS,
    SLOT_STRIDE,
    V_CACHE,
    WINDOW,
)
from labkit.kernels.cpu.rowwise import LEVELS, array_at

LEAST, LEAST_VALUE = np.float32(1e-30), np.float32(1e-10)
"""What the largest number of a key, or of a value, counts as at least. A value's step divides a weight that vectors
cut off at 2^-126: that of a key that nobody sees must come to nothing all the same."""


@jit
def levels(n):
    """Steps from zero to the largest number where ``n`` products with 2^LEVELS at most are summed up in an int32."""
    return np.float32(2 ** (31 - LEVELS) // n - 1)


@jit
def tile_at(tile, group, n_kv, d):
    """Where a tile lies, in bytes."""
    return (tile * n_kv + group) * tile_bytes(d)


@jit
def unseen(layer, key, n, n_past):
    """Whether none of the keys [key, key + n) is seen by the token at ``n_past``, nor by any after it."""
    window = layer[WINDOW]
    return window != 0 and key + n <= n_past + 1 - window and key >= layer[N_SINKS]


@jit
def make(rank, n_threads, layer, n_past, n_tokens, slot, integers, own, out):
    """This thread's tiles of what the tokens [n_past, n_past + n_tokens) see. own, out: addresses."""
    d, n_kv, bf16 = layer[D_HEAD], layer[N_KV], layer[CACHE_FORMAT] == BF16
    row = d * (2 if bf16 else 4)
    n_keys = n_past + n_tokens
    for piece in range(rank, -(-n_keys // TILE) * n_kv, n_threads):
        tile, group = piece // n_kv, piece % n_kv
        key = tile * TILE
        n = min(TILE, n_keys - key)
        if unseen(layer, key, n, n_past):
            continue
        at = slot * layer[SLOT_STRIDE] + group * layer[HEAD_STRIDE] + key * row
        k, v, to = layer[K_CACHE] + at, layer[V_CACHE] + at, out + tile_at(tile, group, n_kv, d)
        if integers:
            _round_keys(bf16, k, row, n, d, own, to)
            _round_values(bf16, v, row, n, d, own, to + 2 * TILE * whole(d) + 4 * TILE)
        else:
            _keys(bf16, k, row, n, d, to)
            _values(bf16, v, row, n, d, to + 4 * TILE * d)


@jit
def _keys(bf16, k, row, n, d, out):
    for key in range(0, n, ROWS):
        for half in range(2):
            if bf16:
                panels.pack_bf16(k + key * row, row, n - 1 - key, d, half, out + 4 * d * key)
            else:
                panels.pack_fp32(k + key * row, row, n - 1 - key, d, half, out + 4 * d * key)


@jit
def _values(bf16, v, row, n, d, out):
    for key in range(n):
        for channel in range(0, d, ROWS):
            to, n_here = out + 4 * TILE * channel + WORD * key, min(ROWS, d - channel)
            _widen(bf16, v + row * key + channel * (2 if bf16 else 4), n_here, to)
            fill(to, n_here, ROWS, np.float32(0.0))


@jit
def _widen(bf16, x, n, to):
    """n numbers, a multiple of 8, as float32."""
    if bf16:
        rowwise.widen_bf16(x, n, to)
    else:
        copy(x, n, to)


@jit
def round_row(x, d, limit, to, step):
    """d float32 as int16 with one step, zeros up to whole panels."""
    top = rounding.top(x, d, LEAST)
    floats(step, 1)[0] = top / limit
    rounding.round_int16(x, d, limit / top, to)
    tail = carray(array_at(to), (whole(d),), np.int16)
    for i in range(d, whole(d)):
        tail[i] = 0


@jit
def _round_keys(bf16, k, row, n, d, own, out):
    wide, limit = whole(d), levels(whole(d))
    steps, rounded = out + 2 * TILE * wide, own + 4 * wide
    for first in range(0, n, ROWS):
        for r in range(ROWS):
            x = k + row * min(first + r, n - 1)
            if bf16:
                rowwise.widen_bf16(x, d, own)
                x = own
            round_row(x, d, limit, rounded + 2 * wide * r, steps + 4 * (first + r))
        for half in range(2):
            panels.pack_fp32(rounded, 2 * wide, ROWS - 1, wide // 2, half, out + 2 * wide * first)


@jit
def _round_values(bf16, v, row, n, d, own, out):
    wide, limit = whole(d), levels(TILE)
    logs, parts = floats(out + 2 * TILE * wide, TILE), floats(out + 2 * TILE * wide + 4 * TILE, TILE)
    for key in range(0, (n + 7) // 8 * 8, 2):  # whole vectors: what is not there meets a weight of 0
        x, y = v + row * min(key, n - 1), v + row * min(key + 1, n - 1)
        if bf16:
            rowwise.widen_bf16(x, d, own)
            rowwise.widen_bf16(y, d, own + 4 * d)
            x, y = own, own + 4 * d
        tops = rounding.top(x, d, LEAST_VALUE), rounding.top(y, d, LEAST_VALUE)
        for i in range(2):
            logs[key + i] = np.float32(math.log(tops[i] / limit))
            sound = tops[i] == tops[i]  # those who do not see a NaN must not meet it here
            parts[key + i] = limit / tops[i] if sound else np.float32(1.0)
        to = out + WORD * (key // 2)
        rounding.round_pairs(x, limit / tops[0], y, limit / tops[1], d, to, 2 * ROWS * TILE)
