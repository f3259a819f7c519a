# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Attention of a run of consecutive tokens over a contiguous cache: what a prompt spends its time in when it is long.

The tokens are cut into items, some tokens and the query heads of one group each: their rows, (token, head), meet a
tile of keys (``attention_panels``) as a matrix meets a panel (``tiles``), and the exponentials meet the values the same
way. A running maximum and sum keep one pass: Dao et al., FlashAttention (arXiv 2205.14135). As integers, a query has a
step, and a tile's exponentials one, of their largest: what is rounded away is small beside it.
"""

from __future__ import annotations

import math

import numpy as np

from labkit.kernels.cpu import rowwise, tiles
from labkit.kernels.cpu.attention import LOWEST
from labkit.kernels.cpu.attention_panels import round_row, tile_at, unseen
from labkit.kernels.cpu.blocks import fill, floats
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.memory import BAND, MOST_ROWS, ROWS, STEP, TILE, WORD, whole
from labkit.kernels.cpu.plan import D_HEAD, N_HEADS, N_KV, N_SINKS, SCALE, SOFTCAP, WINDOW
from labkit.kernels.cpu.rowwise import LEVELS

ITEMS_A_THREAD = 4


@jit
def attend(rank, n_threads, layer, numbers, q, q_row, n_tokens, n_past, integers, panels, own, out, out_row):
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
            layer, numbers, q + first * q_row + offset, q_row, n_here, n_past + first, group, n_shared, integers,
            panels, own, out + first * out_row + offset, out_row,
        )  # fmt: skip


@jit
def _attend_item(layer, numbers, q, q_row, n_tokens, n_past, group, n_shared, integers, panels, own, out, out_row):
    """A few tokens, one group: q and out are the group's own heads."""
    d, cap, wide = layer[D_HEAD], numbers[SOFTCAP], whole(layer[D_HEAD])
    n_rows = n_tokens * n_shared
    padded = (n_rows + STEP - 1) // STEP * STEP
    q_size, v_size = (2 * wide, 2 * TILE) if integers else (4 * d, 4 * TILE)
    queries, sums = own, own + 4 * wide * padded
    tops = sums + 4 * wide * padded
    q_steps = tops + 8 * padded
    scores = (q_steps + 4 * padded + 63) // 64 * 64
    weights = scores + 4 * BAND * TILE
    w_steps = weights + 2 * BAND * TILE
    ones = w_steps + 4 * BAND
    zeros = ones + 4 * ROWS
    _begin(q, q_row, n_tokens, n_shared, d, numbers[SCALE], integers, queries, q_steps, padded, sums, tops, w_steps)
    n_keys = n_past + n_tokens
    window = layer[WINDOW] if layer[WINDOW] != 0 else n_keys
    for key in range(0, n_keys, TILE):
        n = min(TILE, n_keys - key)
        if unseen(layer, key, n, n_past):
            continue
        keys = panels + tile_at(key // TILE, group, layer[N_KV], d)
        k_steps = keys + 2 * TILE * wide
        values = k_steps + 4 * TILE if integers else keys + 4 * TILE * d
        v_logs = values + 2 * TILE * wide
        first = max(0, key - n_past) * n_shared // BAND * BAND
        for row in range(first, padded, BAND):
            end_row = min(row + BAND, padded)
            last_t = min(n_tokens - 1, (end_row - 1) // n_shared)
            n_seen = min(n, n_past + last_t + 1 - key)
            for at in range(0, n_seen, ROWS):
                here, to = keys + q_size * at, scores + 4 * at
                for i in range(row, end_row, STEP):
                    if integers:
                        tiles.pairs_6(
                            here, queries + q_size * i, q_size, wide // 2, k_steps + 4 * at, v_logs + 4 * at,
                            q_steps + 4 * i, to, 4 * TILE, 1,
                        )  # fmt: skip
                    else:
                        tiles.floats_6(here, WORD, queries + q_size * i, q_size, d, to, 4 * TILE, 1, here, 0, 0, 0)
                    to += 4 * TILE * STEP
            for i in range(row, min(end_row, n_rows)):
                position = n_past + i // n_shared
                end = min(n, position + 1 - key)
                begin = max(0, position + 1 - window - key)
                sinks = max(0, min(layer[N_SINKS] - key, begin))
                _settle(
                    scores + 4 * TILE * (i - row), sinks, begin, end, (n_seen + 7) // 8 * 8, cap, integers, wide,
                    sums + 4 * wide * i, tops + 8 * i, weights + 2 * TILE * (i - row), w_steps + 4 * (i - row),
                    v_logs,
                )  # fmt: skip
            for at in range(0, wide, ROWS):
                here = values + v_size * at
                for i in range(row, end_row, STEP):
                    to = sums + 4 * (wide * i + at)
                    if integers:
                        tiles.pairs_6(
                            here, weights + 2 * TILE * (i - row), 2 * TILE, (n_seen + 3) // 4 * 2, ones, zeros,
                            w_steps + 4 * (i - row), to, 4 * wide, 0,
                        )  # fmt: skip
                    else:
                        ours = scores + 4 * TILE * (i - row)
                        tiles.floats_6(here, WORD, ours, 4 * TILE, n_seen, to, 4 * wide, 0, here, 0, 0, 0)
    for t in range(n_tokens):
        for h in range(n_shared):
            i = t * n_shared + h
            y, x = floats(out + t * out_row + 4 * d * h, d), floats(sums + 4 * wide * i, d)
            share = np.float32(1.0) / floats(tops + 8 * i, 2)[1]
            for j in range(d):
                y[j] = x[j] * share


@jit
def _begin(q, q_row, n_tokens, n_shared, d, scale, integers, queries, q_steps, padded, sums, tops, w_steps):
    """Queries side by side and scaled, and nothing summed up yet. A row that is padding weighs nothing."""
    wide = whole(d)
    for t in range(n_tokens):
        for h in range(n_shared):
            x, i = q + t * q_row + 4 * d * h, t * n_shared + h
            if integers:
                round_row(x, d, np.float32(2**LEVELS), queries + 2 * wide * i, q_steps + 4 * i)
                floats(q_steps + 4 * i, 1)[0] *= scale
            else:
                y, given = floats(queries + 4 * d * i, d), floats(x, d)
                for j in range(d):
                    y[j] = given[j] * scale
    n_rows = n_tokens * n_shared
    if integers:
        fill(queries, n_rows * wide // 2, padded * wide // 2, np.float32(0.0))
        fill(q_steps, n_rows, padded, np.float32(0.0))
        fill(w_steps, 0, BAND, np.float32(0.0))
        fill(w_steps + 4 * BAND, 0, ROWS, np.float32(1.0))  # a value has no step of its own: its weight has it
        fill(w_steps + 4 * BAND, ROWS, 2 * ROWS, np.float32(0.0))
    else:
        fill(queries, n_rows * d, padded * d, np.float32(0.0))
    fill(sums, 0, padded * wide, np.float32(0.0))
    state = floats(tops, 2 * padded)
    for i in range(padded):
        state[2 * i], state[2 * i + 1] = LOWEST, 0.0


@jit
def _settle(scores, sinks, begin, end, padded, cap, integers, wide, sums, state, weights, w_step, v_logs):
    """One row's scores of a tile to exponentials, those it does not see to zeros; what was summed up so far shrinks
    where the maximum rose. It sees [0, sinks) and [begin, end); state: its largest score, and its sum.

    As float32 they are under the new maximum, in place; as int16 under the tile's, at ``weights``, with their step."""
    s = floats(scores, padded)
    if end <= begin and sinks == 0:
        if integers:
            fill(weights, 0, padded // 2, np.float32(0.0))
        else:
            fill(scores, 0, padded, np.float32(0.0))
        return
    if cap != 0.0:
        logs = floats(v_logs, padded)
        for i in range(max(end, sinks)):
            if integers:
                s[i] = cap * np.float32(math.tanh((s[i] - logs[i]) / cap)) + logs[i]
            else:
                s[i] = cap * np.float32(math.tanh(s[i] / cap))
    fill(scores, sinks, min(begin, padded), LOWEST)
    fill(scores, max(end, sinks), padded, LOWEST)
    known = floats(state, 2)
    highest = rowwise.highest(scores, padded)
    top = max(known[0], highest)
    if top > known[0]:
        known[1] *= rowwise.shrink(sums, wide, known[0], top)
        known[0] = top
    if integers:
        known[1] += rowwise.weights(scores, padded, highest, top, v_logs + 4 * TILE, weights, w_step)
        return
    known[1] += rowwise.exponentials(scores, padded, top)
    fill(scores, sinks, min(begin, padded), np.float32(0.0))  # the smallest exponential is not quite that
    fill(scores, max(end, sinks), padded, np.float32(0.0))
