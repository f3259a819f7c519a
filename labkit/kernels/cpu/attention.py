# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""One token's attention over a contiguous cache in one pass: a tile of keys at a time, a running maximum and sum.

    attend   every head over a share of the keys
    merge    the shares put together

After Dao et al., FlashAttention (arXiv 2205.14135), and Flash-Decoding for the shares.
"""

from __future__ import annotations

import math

import numpy as np

from labkit.kernels.cpu import dots, rowwise
from labkit.kernels.cpu.blocks import fill, floats
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.memory import TILE
from labkit.kernels.cpu.plan import (
    BF16,
    CACHE_FORMAT,
    D_HEAD,
    HEAD_STRIDE,
    K_CACHE,
    N_HEADS,
    N_KV,
    N_SINKS,
    RING,
    RING_SINKS,
    SCALE,
    SLOT_STRIDE,
    SOFTCAP,
    V_CACHE,
    WINDOW,
)

LOWEST = np.float32(-1e30)


@jit
def row_of(layer, position):
    """The row of a sequence's store where a position lies: the position itself, or behind the sinks in a ring."""
    if layer[RING] == 0 or position < layer[RING_SINKS]:
        return position
    return layer[RING_SINKS] + (position - layer[RING_SINKS]) % layer[RING]


@jit
def attend(layer, numbers, q, n_stored, slot, part, n_parts, partial, scores):
    """One part of one token's attention: every head over a share of the keys it may see in the slot's sequence.

    q (H, D) at an address, rotated; partial (H, D + 2) at an address: the unnormalised sum of values, the largest
    score and the sum of exponentials, to be merged with the other parts'.
    """
    d, rows = layer[D_HEAD], layer[N_HEADS] // layer[N_KV]
    bf16 = layer[CACHE_FORMAT] == BF16
    size = 2 if bf16 else 4
    # Visible keys: the sinks [0, n_sinks), then the window [low, n_stored).
    low, sinks = 0, 0
    if layer[WINDOW] != 0 and n_stored > layer[WINDOW]:
        low = n_stored - layer[WINDOW]
        sinks = min(layer[N_SINKS], low)
    n_seen = sinks + n_stored - low
    first, end = n_seen * part // n_parts, n_seen * (part + 1) // n_parts
    for head in range(layer[N_HEADS]):
        out, q_head = partial + 4 * (d + 2) * head, q + 4 * d * head
        _begin(out, d)
        at = first
        while at < end:
            # A tile lies within the sinks or within the window, and ends where a ring does: consecutive rows.
            stop = min(at + TILE, end)
            if at < sinks:
                stop = min(stop, sinks)
                key = row_of(layer, at)
            else:
                key = row_of(layer, at - sinks + low)
            if layer[RING] != 0:
                turn = layer[RING_SINKS] if key < layer[RING_SINKS] else layer[RING_SINKS] + layer[RING]
                stop = min(stop, at + turn - key)
            offset = slot * layer[SLOT_STRIDE] + head // rows * layer[HEAD_STRIDE] + key * d * size
            keys, values, n = layer[K_CACHE] + offset, layer[V_CACHE] + offset, stop - at
            _scores(bf16, keys, d, n, q_head, scores)
            _settle(scores, n, numbers[SCALE], numbers[SOFTCAP], d, out)
            if bf16:
                rowwise.mix_bf16(values, 2 * d, n, scores, d, out)
            else:
                rowwise.mix_fp32(values, 4 * d, n, scores, d, out)
            at = stop


@jit
def _begin(out, d):
    fill(out, 0, d + 2, np.float32(0.0))
    floats(out, d + 2)[d] = LOWEST


@jit
def _settle(scores, n, scale, cap, d, out):
    """n scores to exponentials under the new maximum; one head's sum so far, out (D + 2,), shrunk to match."""
    s, y = floats(scores, TILE), floats(out, d + 2)
    padded = (n + 7) // 8 * 8
    for i in range(n, padded):
        s[i] = LOWEST
    top = max(y[d], rowwise.scaled_peak(scores, padded, scale))
    if cap != 0.0:
        top = y[d]
        for i in range(n):
            s[i] = cap * np.float32(math.tanh(s[i] / cap))
            top = max(top, s[i])
    shrink = np.float32(math.exp(y[d] - top))
    for i in range(d):
        y[i] *= shrink
    y[d + 1] = y[d + 1] * shrink + rowwise.exponentials(scores, padded, top)
    y[d] = top


@jit
def _scores(bf16, keys, d, n, q, scores):
    i = 0
    if bf16:
        while i + 4 <= n:
            dots.dot_bf16(keys + i * 2 * d, 2 * d, d, q, scores + 4 * i)
            i += 4
        while i < n:
            dots.dot_bf16_one(keys + i * 2 * d, 2 * d, d, q, scores + 4 * i)
            i += 1
    else:
        while i + 4 <= n:
            dots.dot_fp32(keys + i * 4 * d, 4 * d, d, q, scores + 4 * i)
            i += 4
        while i < n:
            dots.dot_fp32_one(keys + i * 4 * d, 4 * d, d, q, scores + 4 * i)
            i += 1


@jit
def merge(partials, stride, n_parts, n_heads, d, out):
    """The parts of attention (each (H, D + 2), ``stride`` bytes apart) to the heads' outputs (H, D)."""
    y = floats(out, n_heads * d)
    for head in range(n_heads):
        top = LOWEST
        for t in range(n_parts):
            top = max(top, floats(partials + t * stride + 4 * (d + 2) * head, d + 2)[d])
        total = np.float32(0.0)
        fill(out, head * d, (head + 1) * d, np.float32(0.0))
        for t in range(n_parts):
            part = floats(partials + t * stride + 4 * (d + 2) * head, d + 2)
            share = np.float32(math.exp(part[d] - top))
            total += share * part[d + 1]
            for i in range(d):
                y[head * d + i] += share * part[i]
        for i in range(d):
            y[head * d + i] /= total
