# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Attention of a run of consecutive tokens over a contiguous cache: what a prompt spends its time in when it is long.

The tokens are cut into items, some tokens and the query heads of one group each: their rows, (token, head), meet a
tile of keys as a matrix meets a panel (``tiles``), and the exponentials meet the values the same way. A running
maximum and sum keep one pass: Dao et al., FlashAttention (arXiv 2205.14135).
"""

from __future__ import annotations

import math

import numpy as np

from labkit.kernels.cpu import panels, rowwise, tiles
from labkit.kernels.cpu.attention import LOWEST
from labkit.kernels.cpu.blocks import copy, fill, floats
from labkit.kernels.cpu.jit import entry, jit
from labkit.kernels.cpu.plan import (
    BF16,
    CACHE_FORMAT,
    D_HEAD,
    HEAD_STRIDE,
    K_CACHE,
    N_HEADS,
    N_KV,
    N_SINKS,
    SCALE,
    SLOT_STRIDE,
    SOFTCAP,
    V_CACHE,
    WINDOW,
)
from labkit.kernels.cpu.tiles import ROWS, WORD

TILE = 128
"""Keys that are a panel, and meet all of an item's rows, before the next."""
MOST_ROWS = 96
"""Rows of an item (one token's heads may be more)."""
STEP = 6
"""Rows that a register tile takes: items are padded to whole tiles."""
ITEMS_A_THREAD = 4


@entry
def rows_of_item(n_shared):
    """Rows that an item has at most, where ``n_shared`` query heads share a key head."""
    return (max(MOST_ROWS, n_shared) + STEP - 1) // STEP * STEP


@entry
def own_floats(d, n_shared):
    """float32 numbers of a thread's own memory: queries, outputs, maxima and sums, one tile's scores, keys, values."""
    wide = (d + ROWS - 1) // ROWS * ROWS
    n_rows = rows_of_item(n_shared)
    return n_rows * (d + wide + 2) + TILE * (STEP + d + wide) + 64


@jit
def attend(rank, n_threads, layer, numbers, q, q_row, n_tokens, n_past, slot, own, out, out_row):
    """This thread's items of ``n_tokens`` tokens' attention, which follow ``n_past`` stored ones.

    q (T, H, D) and out (T, H, D), rows apart, float32, at addresses; own: ``own_floats`` numbers."""
    n_kv = layer[N_KV]
    n_shared = layer[N_HEADS] // n_kv
    n_most = max(1, MOST_ROWS // n_shared)
    n_blocks = (ITEMS_A_THREAD * n_threads + n_kv - 1) // n_kv
    n_each = max(1, min(n_most, (n_tokens + n_blocks - 1) // n_blocks))
    n_blocks = (n_tokens + n_each - 1) // n_each
    for item in range(rank, n_blocks * n_kv, n_threads):
        first, group = item // n_kv * n_each, item % n_kv
        offset = 4 * layer[D_HEAD] * n_shared * group
        n_here = min(n_each, n_tokens - first)
        _attend_item(
            layer, numbers, q + first * q_row + offset, q_row, n_here, n_past + first, slot, group, n_shared, own,
            out + first * out_row + offset, out_row,
        )  # fmt: skip


@jit
def _attend_item(layer, numbers, q, q_row, n_tokens, n_past, slot, group, n_shared, own, out, out_row):
    """A few tokens, one group: q and out are the group's own heads."""
    d, cap = layer[D_HEAD], numbers[SOFTCAP]
    wide = (d + ROWS - 1) // ROWS * ROWS
    bf16 = layer[CACHE_FORMAT] == BF16
    n_rows = n_tokens * n_shared
    padded = (n_rows + STEP - 1) // STEP * STEP
    queries, sums = own, own + 4 * d * padded
    tops = sums + 4 * wide * padded
    scores = (tops + 8 * padded + 63) // 64 * 64
    keys = scores + 4 * STEP * TILE
    values = keys + 4 * d * TILE
    _begin(q, q_row, n_tokens, n_shared, d, numbers[SCALE], queries, padded, sums, wide, tops)
    n_keys = n_past + n_tokens
    window = layer[WINDOW] if layer[WINDOW] != 0 else n_keys
    low = max(0, n_past + 1 - window)  # the first key that any of the tokens sees, sinks aside
    at = slot * layer[SLOT_STRIDE] + group * layer[HEAD_STRIDE]
    size = 2 if bf16 else 4
    for key in range(0, n_keys, TILE):
        n = min(TILE, n_keys - key)
        if key + n <= low and key >= layer[N_SINKS]:
            continue
        k_at, v_at, v_row = layer[K_CACHE] + at + key * d * size, layer[V_CACHE] + at + key * d * size, 4 * d
        for column in range(0, n, ROWS):
            for half in range(2):
                to, last = keys + 4 * d * column, n - 1 - column
                if bf16:
                    panels.pack_bf16(k_at + column * d * size, d * size, last, d, half, to)
                else:
                    panels.pack_fp32(k_at + column * d * size, d * size, last, d, half, to)
        if bf16 or wide != d:
            _widen(bf16, v_at, n, d, wide, values)
            v_at, v_row = values, 4 * wide
        first = max(0, key - n_past) * n_shared // STEP * STEP
        for row in range(first, padded, STEP):
            last_t = min(n_tokens - 1, (row + STEP - 1) // n_shared)
            n_seen = min(n, n_past + last_t + 1 - key)
            ours = queries + 4 * d * row
            for column in range(0, n_seen, ROWS):
                here = keys + 4 * d * column
                tiles.floats_6(here, WORD, ours, 4 * d, d, scores + 4 * column, 4 * TILE, 1, here, 0, 0, 0)
            for i in range(row, min(row + STEP, n_rows)):
                position = n_past + i // n_shared
                end = min(n, position + 1 - key)
                begin = max(0, position + 1 - window - key)
                sinks = max(0, min(layer[N_SINKS] - key, begin))
                _settle(
                    scores + 4 * TILE * (i - row), sinks, begin, end, (n_seen + 7) // 8 * 8, cap, wide,
                    sums + 4 * wide * i, tops + 8 * i,
                )  # fmt: skip
            for column in range(0, wide, ROWS):
                to = sums + 4 * (wide * row + column)
                tiles.floats_6(v_at + 4 * column, v_row, scores, 4 * TILE, n_seen, to, 4 * wide, 0, v_at, 0, 0, 0)
    for t in range(n_tokens):
        for h in range(n_shared):
            i = t * n_shared + h
            y, x = floats(out + t * out_row + 4 * d * h, d), floats(sums + 4 * wide * i, d)
            share = np.float32(1.0) / floats(tops + 8 * i, 2)[1]
            for j in range(d):
                y[j] = x[j] * share


@jit
def _begin(q, q_row, n_tokens, n_shared, d, scale, queries, padded, sums, wide, tops):
    """Queries side by side and scaled, and nothing summed up yet."""
    for t in range(n_tokens):
        x, y = floats(q + t * q_row, n_shared * d), floats(queries + 4 * d * n_shared * t, n_shared * d)
        for i in range(n_shared * d):
            y[i] = x[i] * scale
    fill(queries, n_tokens * n_shared * d, padded * d, np.float32(0.0))
    fill(sums, 0, padded * wide, np.float32(0.0))
    state = floats(tops, 2 * padded)
    for i in range(padded):
        state[2 * i], state[2 * i + 1] = LOWEST, 0.0


@jit
def _widen(bf16, v, n, d, wide, out):
    """n value rows as float32, each to whole panels."""
    for i in range(n):
        if bf16:
            rowwise.widen_bf16(v + 2 * d * i, d, out + 4 * wide * i)
        else:
            copy(v + 4 * d * i, d, out + 4 * wide * i)
        fill(out + 4 * wide * i, d, wide, np.float32(0.0))


@jit
def _settle(scores, sinks, begin, end, padded, cap, wide, sums, state):
    """One row's scores of a tile to exponentials under its new maximum, those it does not see to zeros; what was summed
    up so far shrinks to match. It sees [0, sinks) and [begin, end); state: its largest score, and its sum."""
    s = floats(scores, padded)
    if end <= begin and sinks == 0:
        fill(scores, 0, padded, np.float32(0.0))
        return
    if cap != 0.0:
        for i in range(max(end, sinks)):
            s[i] = cap * np.float32(math.tanh(s[i] / cap))
    fill(scores, sinks, min(begin, padded), LOWEST)
    fill(scores, max(end, sinks), padded, LOWEST)
    known = floats(state, 2)
    top = max(known[0], rowwise.highest(scores, padded))
    if top > known[0]:
        shrink = np.float32(math.exp(known[0] - top))
        y = floats(sums, wide)
        for i in range(wide):
            y[i] *= shrink
        known[0], known[1] = top, known[1] * shrink
    known[1] += rowwise.exponentials(scores, padded, top)
    fill(scores, sinks, min(begin, padded), np.float32(0.0))  # the smallest exponential is not quite that
    fill(scores, max(end, sinks), padded, np.float32(0.0))
