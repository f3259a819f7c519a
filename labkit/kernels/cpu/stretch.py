"""The inner loop of attention over a stored cache: a stretch of one sequence's tokens into running sums.

One pass over the stored bytes: tiles of keys are scored, an online softmax (Milakov & Gimelshein, arXiv 1805.02867)
keeps a running maximum and sum for each query head, tiles of values are mixed in. K and V are never rebuilt.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.cpu import stored_spec as cells
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.memory import STORED_TILE
from labkit.kernels.cpu.rowwise import array_at, exponentials
from labkit.kernels.cpu.stored_simd import (
    fold,
    largest,
    mix,
    score_channels,
    score_rows,
)
from labkit.kernels.cpu.stored_spec import MAX_ROWS

MASKED = np.float32(-np.inf)


@jit
def _soften(rows, s, s_at, s_stride, n, first, last, softcap, m, total, acc):  # type: ignore[no-untyped-def]
    """Scores [first, last) of a tile of n to weights, in place, and the others to 0 (a grid's zero is mixed in for the
    whole tile); the running maximum, sum and mix follow."""
    for r in range(rows):
        if softcap > 0:
            for t in range(first, last):
                s[r, t] = softcap * np.tanh(s[r, t] / softcap)
        for t in range(first):
            s[r, t] = MASKED
        for t in range(last, n):
            s[r, t] = MASKED
        at = s_at + r * s_stride
        best = largest(at, n)
        if best > m[r]:
            shrink = np.float32(np.exp(m[r] - best))
            total[r] *= shrink
            for d in range(acc.shape[1]):
                acc[r, d] *= shrink
            m[r] = best
        total[r] += exponentials(at, n, m[r])


def stretch(spec_at, table_at, seq, g, rows, q, lo, hi, blocked, state, softcap):  # type: ignore[no-untyped-def]
    """Absorb positions lo ... hi-1 of one sequence and one KV head into the state of ``rows`` query heads.

    table_at, q and state are addresses: the sequence's block table, the (rows, Dk) scaled queries and the
    workspace (``workspace_size``), which begins with m, total (MAX_ROWS each) and acc (MAX_ROWS, Dv): the running
    maximum, sum and mix.
    """
    spec = carray(array_at(spec_at), cells.N_SPEC, np.int64)
    dims_k, dims_v, ring, n_grids = (
        spec[cells.DIMS_K],
        spec[cells.DIMS_V],
        spec[cells.RECENT_TOKENS],
        spec[cells.V_GRIDS],
    )
    block = spec[cells.BLOCK]
    table = carray(array_at(table_at), -(-hi // block), np.int32)
    m = carray(array_at(state), MAX_ROWS, np.float32)
    total = carray(array_at(state + 4 * MAX_ROWS), MAX_ROWS, np.float32)
    acc_at = state + 8 * MAX_ROWS
    acc = carray(array_at(acc_at), (MAX_ROWS, dims_v), np.float32)
    tile = max(STORED_TILE, block)
    s_at = acc_at + 4 * MAX_ROWS * dims_v
    s = carray(array_at(s_at), (MAX_ROWS, tile), np.float32)
    shifts_at = s_at + 4 * MAX_ROWS * tile
    shifts = carray(array_at(shifts_at), MAX_ROWS, np.float32)
    scaled_at = shifts_at + 4 * MAX_ROWS
    weights_at = scaled_at + 4 * MAX_ROWS * dims_k
    s_stride, q_stride, acc_stride, grid_stride = 4 * tile, 4 * dims_k, 4 * dims_v, 4 * MAX_ROWS * tile
    pos = lo
    while pos < hi:
        # A tile: some blocks, or a run of the ring. It is scored whole; positions outside [pos, hi) weigh nothing.
        in_blocks = pos < blocked
        if in_blocks:
            kind, run, k_row, v_row = spec[cells.KIND], block, spec[cells.K_ROW], spec[cells.V_ROW]
            end = min(hi, blocked)
            first_block = pos // block
            n_runs = min(max(1, STORED_TILE // block), -(-end // block) - first_block)
            start = first_block * block
            last = min(end - start, n_runs * block)
        else:
            kind, k_row, v_row = spec[cells.RECENT_KIND], spec[cells.RECENT_K_ROW], spec[cells.RECENT_V_ROW]
            slot = pos % ring // 8 * 8
            start = pos - pos % ring % 8
            n_runs, first_block = 1, 0
            last = min(STORED_TILE, hi - start, ring - slot)
            run = -(-last // 8) * 8
        first = pos - start
        for j in range(n_runs):
            at = s_at + 4 * j * run
            if in_blocks:
                block_idx = np.int64(table[first_block + j])
                k = spec[cells.K] + g * spec[cells.K_GROUP] + block_idx * spec[cells.K_BLOCK]
            else:
                k = (
                    spec[cells.RECENT_K]
                    + seq * spec[cells.RECENT_K_SEQ]
                    + g * spec[cells.RECENT_K_GROUP]
                    + slot * k_row
                )
            if kind <= cells.BF16:
                score_rows(kind, rows, q, q_stride, dims_k, k, k_row, run, at, s_stride)
            else:
                grid = g * spec[cells.K_SCALE_GROUP] + block_idx * spec[cells.K_SCALE_BLOCK]
                fold(
                    rows, q, q_stride, dims_k, spec[cells.K_SCALE] + grid, spec[cells.K_ZERO] + grid,
                    scaled_at, q_stride, shifts_at,
                )  # fmt: skip
                score_channels(kind, rows, scaled_at, q_stride, dims_k, k, k_row, run, at, s_stride)
                for r in range(rows):
                    for t in range(j * run, (j + 1) * run):
                        s[r, t] += shifts[r]
        _soften(rows, s, s_at, s_stride, n_runs * run, first, last, softcap, m, total, acc)
        for j in range(n_runs):
            p, p_stride, grid_dims = s_at + 4 * j * run, s_stride, dims_v
            begin, stop = max(0, first - j * run), min(run, last - j * run)
            if in_blocks:
                block_idx = np.int64(table[first_block + j])
                v = spec[cells.V] + g * spec[cells.V_GROUP] + block_idx * spec[cells.V_BLOCK]
            else:
                v = (
                    spec[cells.RECENT_V]
                    + seq * spec[cells.RECENT_V_SEQ]
                    + g * spec[cells.RECENT_V_GROUP]
                    + slot * v_row
                )
            if kind > cells.BF16:
                grid_dims = dims_v // n_grids
                for w in range(n_grids):
                    grid = g * spec[cells.V_SCALE_GROUP] + block_idx * spec[cells.V_SCALE_BLOCK] + 2 * w * block
                    fold(
                        rows, p, s_stride, block, spec[cells.V_SCALE] + grid, spec[cells.V_ZERO] + grid,
                        weights_at + w * grid_stride, s_stride, shifts_at,
                    )  # fmt: skip
                    for r in range(rows):
                        for d in range(w * grid_dims, (w + 1) * grid_dims):
                            acc[r, d] += shifts[r]
                p = weights_at
            mix(
                kind, rows, v + begin * v_row, v_row, stop - begin, p + 4 * begin, p_stride, grid_stride, grid_dims,
                dims_v, acc_at, acc_stride,
            )  # fmt: skip
        pos = start + last
