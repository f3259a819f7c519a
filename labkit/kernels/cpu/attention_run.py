# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Attention of a run of consecutive tokens of one sequence: what a prompt spends its time in when it is long.

The tokens are cut into items, some tokens and the query heads of one group each: their rows, (token, head), meet a
tile of keys (``attention_panels``) as a matrix meets a panel (``tiles``), and the weights meet the values the same way.
"""

from __future__ import annotations

import numpy as np

from labkit.kernels.cpu import tiles
from labkit.kernels.cpu.attention import absorb, clear, finish, soften, span
from labkit.kernels.cpu.attention_panels import tile_at, unseen
from labkit.kernels.cpu.blocks import fill, floats
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.memory import BAND, MOST_ROWS, ROWS, STEP, TILE, WORD, whole
from labkit.kernels.cpu.plan import D_HEAD, N_HEADS, N_KV, SCALE, SOFTCAP

ITEMS_A_THREAD = 4


@jit
def attend(rank, n_threads, layer, numbers, q, q_row, n_tokens, n_past, panels, own, out, out_row):
    """This thread's items of ``n_tokens`` tokens' attention, which follow ``n_past`` stored ones.

    q (T, H, D) and out (T, H, D), rows apart, float32, at addresses; panels: of all keys (``attention_panels.make``);
    own: ``own_floats`` numbers."""
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
            layer, numbers, q + first * q_row + offset, q_row, n_here, n_past + first, group, n_shared,
            panels, own, out + first * out_row + offset, out_row,
        )  # fmt: skip


@jit
def _attend_item(layer, numbers, q, q_row, n_tokens, n_past, group, n_shared, panels, own, out, out_row):
    """A few tokens, one group: q and out are the group's own heads."""
    d, wide = layer[D_HEAD], whole(layer[D_HEAD])
    n_rows = n_tokens * n_shared
    padded = (n_rows + STEP - 1) // STEP * STEP
    queries, states, size = own, own + 4 * d * padded, 4 * (wide + 2)
    scores = (states + size * padded + 63) // 64 * 64
    pieces = scores + 4 * BAND * TILE
    _begin(q, q_row, n_tokens, n_shared, d, numbers[SCALE], queries, padded, states)
    n_keys = n_past + n_tokens
    for key in range(0, n_keys, TILE):
        n = min(TILE, n_keys - key)
        if unseen(layer, key, n, n_past):
            continue
        keys = panels + tile_at(key // TILE, group, layer[N_KV], d)
        values = keys + 4 * TILE * d
        for row in range(max(0, key - n_past) * n_shared // BAND * BAND, n_rows, BAND):
            end_row = min(row + BAND, padded)
            last_t = min(n_tokens - 1, (end_row - 1) // n_shared)
            n_seen = min(n, n_past + last_t + 1 - key)
            for at in range(0, n_seen, ROWS):
                here, to = keys + 4 * d * at, scores + 4 * at
                for i in range(row, end_row, STEP):
                    tiles.floats_6(here, WORD, queries + 4 * d * i, 4 * d, d, to, 4 * TILE, 1, here, 0, 0, 0)
                    to += 4 * TILE * STEP
            _weigh(layer, numbers, scores, n_past, n_shared, key, n, n_seen, row, end_row, n_rows, pieces, wide)
            for at in range(0, wide, ROWS):
                here = values + 4 * TILE * at
                for i in range(0, end_row - row, STEP):
                    ours, to = scores + 4 * TILE * i, pieces + size * i + 4 * at
                    tiles.floats_6(here, WORD, ours, 4 * TILE, n_seen, to, size, 1, here, 0, 0, 0)
            for i in range(row, min(end_row, n_rows)):
                sinks, begin, end = span(layer, n_past + i // n_shared, key, n)
                if sinks > 0 or begin < end:
                    absorb(states + size * i, pieces + size * (i - row), wide)
    for t in range(n_tokens):
        for h in range(n_shared):
            finish(states + size * (t * n_shared + h), wide, d, out + t * out_row + 4 * d * h)


@jit
def _weigh(layer, numbers, scores, n_past, n_shared, key, n, n_seen, row, end_row, n_rows, pieces, wide):
    """A band's scores to weights, 0 where a row sees nothing; the largest and the sums into its pieces."""
    for i in range(row, end_row):
        here = scores + 4 * TILE * (i - row)
        if i >= n_rows:  # padding
            fill(here, 0, n_seen, np.float32(0.0))
            continue
        sinks, begin, end = span(layer, n_past + i // n_shared, key, n)
        if sinks == 0 and begin >= end:
            fill(here, 0, n_seen, np.float32(0.0))
            continue
        soften(here, sinks, begin, end, numbers[SOFTCAP], pieces + 4 * (wide + 2) * (i - row) + 4 * wide)
        fill(here, end, n_seen, np.float32(0.0))


@jit
def _begin(q, q_row, n_tokens, n_shared, d, scale, queries, padded, states):
    """Queries side by side and scaled, and nothing taken up yet. A row that is padding asks for nothing."""
    wide = whole(d)
    for t in range(n_tokens):
        for h in range(n_shared):
            i = t * n_shared + h
            y, given = floats(queries + 4 * d * i, d), floats(q + t * q_row + 4 * d * h, d)
            for j in range(d):
                y[j] = given[j] * scale
            clear(states + 4 * (wide + 2) * i, wide)
    fill(queries, n_tokens * n_shared * d, padded * d, np.float32(0.0))
