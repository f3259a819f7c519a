# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""What attention computes, in one order, so that a token's numbers are the same in whatever company it is computed.

A sequence's keys are cut into tiles at fixed positions, multiples of TILE. One query head and one tile give a piece:

    score[i] = sum_d (scale q[d]) k[i, d]       one chain of multiply-adds over d
    top = max score;  weight = exp(score - top);  sum of weights in 8 lanes;  mix[d] = sum_i weight[i] v[i, d]

in one chain over i, and pieces are taken up one after the other, oldest tile first (``absorb``). Nothing here depends
on how many tokens, sequences or threads there are, on chunks, or on where the cache keeps its rows; ``attention_few``
reads them as they lie, ``attention_run`` as panels. After Dao et al., FlashAttention (arXiv 2205.14135), and
Flash-Decoding.
state, piece    (n + 2,) float32 at an address: the mix of n numbers, the largest score, the sum of weights
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray

from labkit.kernels.cpu import rowwise
from labkit.kernels.cpu import stored_spec as stored
from labkit.kernels.cpu.blocks import fill, floats
from labkit.kernels.cpu.cells import BLOCK_TABLE, N_BLOCKS, N_TABLES
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.plan import (
    BF16,
    CACHE_FORMAT,
    D_HEAD,
    HEAD_STRIDE,
    K_CACHE,
    N_SINKS,
    RING,
    RING_SINKS,
    SLOT_STRIDE,
    SPEC,
    V_CACHE,
    WINDOW,
)
from labkit.kernels.cpu.rowwise import array_at

LOWEST = np.float32(-np.inf)
"""Below every score: weights may be so large that a finite number is not."""
ENDLESS = 1 << 30


@jit
def span(layer, position, key, size):
    """What a token at ``position`` sees of the ``size`` keys from ``key`` on: [0, sinks) and [begin, end)."""
    end = min(size, position + 1 - key)
    begin = 0 if layer[WINDOW] == 0 else max(0, min(size, position + 1 - layer[WINDOW] - key))
    return max(0, min(layer[N_SINKS] - key, begin)), begin, end


@jit
def run_of(layer, held, slot, group, position):
    """Where a position's key and value lie, bytes from a row to the next of each, and how many rows lie so from
    here."""
    if layer[SPEC] == 0:
        row, n = position, ENDLESS
        if layer[RING] != 0:
            sinks = layer[RING_SINKS]
            if position < sinks:
                n = sinks - position
            else:
                row = sinks + (position - sinks) % layer[RING]
                n = sinks + layer[RING] - row
        size = layer[D_HEAD] * (2 if layer[CACHE_FORMAT] == BF16 else 4)
        at = slot * layer[SLOT_STRIDE] + group * layer[HEAD_STRIDE] + row * size
        return layer[K_CACHE] + at, layer[V_CACHE] + at, size, size, n
    spec = carray(array_at(layer[SPEC]), (stored.N_SPEC,), np.int64)
    table = carray(array_at(held[BLOCK_TABLE]), (held[N_TABLES], held[N_BLOCKS]), np.int32)
    size = spec[stored.BLOCK]
    block, row = np.int64(table[slot, position // size]), position % size
    k = spec[stored.K] + group * spec[stored.K_GROUP] + block * spec[stored.K_BLOCK] + row * spec[stored.K_ROW]
    v = spec[stored.V] + group * spec[stored.V_GROUP] + block * spec[stored.V_BLOCK] + row * spec[stored.V_ROW]
    return k, v, spec[stored.K_ROW], spec[stored.V_ROW], size - row


@jit
def soften(scores, sinks, begin, end, cap, state):
    """Scores of a tile to weights, in place: those of [0, sinks) and [begin, end), the others to 0 up to a whole
    vector. state (2,): the largest score, and the weights' sum."""
    padded = (end + 7) // 8 * 8
    s, found = floats(scores, padded), floats(state, 2)
    if cap != 0.0:
        for i in range(end):
            s[i] = cap * np.float32(math.tanh(s[i] / cap))
    fill(scores, sinks, begin, LOWEST)
    fill(scores, end, padded, LOWEST)
    found[0] = rowwise.highest(scores, padded)
    found[1] = rowwise.exponentials(scores, padded, found[0])
    fill(scores, sinks, begin, np.float32(0.0))  # the smallest exponential is not quite that
    fill(scores, end, padded, np.float32(0.0))


@jit
def clear(state, n):
    """A state before the first piece."""
    fill(state, 0, n + 2, np.float32(0.0))
    floats(state, n + 2)[n] = LOWEST


@jit
def absorb(state, piece, n):
    """Take up the next tile's piece."""
    known, new = floats(state, n + 2), floats(piece, n + 2)
    top = max(known[n], new[n])
    kept, added = np.float32(math.exp(known[n] - top)), np.float32(math.exp(new[n] - top))
    for i in range(n):
        known[i] = known[i] * kept + new[i] * added
    known[n + 1] = known[n + 1] * kept + new[n + 1] * added
    known[n] = top


@jit
def finish(state, n, d, out):
    """A state of n numbers to a head's output (D,)."""
    known, y = floats(state, n + 2), floats(out, d)
    share = np.float32(1.0) / known[n + 1]
    for i in range(d):
        y[i] = known[i] * share
