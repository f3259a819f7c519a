"""Attention of a few new tokens over a cache as it is stored: behind a block table, in fp32, bf16, int8 or int4.

    attend(spec, tables, rows, q, n_sinks, scale, softcap, out)

One pass over the stored bytes: tiles of keys are scored, an online softmax (Milakov & Gimelshein, arXiv 1805.02867)
keeps a running maximum and sum for each query head, tiles of values are mixed in. K and V are never rebuilt. The
work is cut by query row, KV head and stretch of tokens, so that one long sequence keeps every core busy
(Flash-Decoding), and the partial results are merged.

spec    (len(SPEC),) int64   where one layer's storage lies: ``make_spec``
tables  (n_sequences, max_blocks) int32   physical block of each logical one
rows    (T, 4) int64         for each query row: table row, first visible position, end, tokens that lie in blocks
q, out  (T, H, D), (T, H, Dv) float32
"""

from __future__ import annotations

from functools import cache

import numba
import numpy as np
from numba import cfunc, njit, prange, types
from numba.np.numpy_support import carray

from labkit.kernels import cpu_cache_spec as cells
from labkit.kernels.cpu_cache_simd import (
    KINDS,
    MAX_ROWS,
    as_pointer,
    call_stretch,
    exponentials,
    fold,
    largest,
    mix,
    score_channels,
    score_rows,
)
from labkit.kernels.cpu_cache_spec import make_spec, why_not

__all__ = ["attend", "compile_now", "make_spec", "why_not"]

TILE = 64
"""Tokens whose scores are held at once."""
_MASKED = np.float32(-1e30)
_BF16 = KINDS["bf16"]
MIN_PARALLEL_READS = 1 << 17
"""Stored numbers below which handing work to other threads costs more than it saves."""


@njit(cache=True, error_model="numpy")
def _soften(rows, s, s_at, s_stride, n, first, last, softcap, m, total, acc):  # type: ignore[no-untyped-def]
    """Scores [first, last) of a tile of n to weights, in place, and the others to 0 (a grid's zero is mixed in for the
    whole tile); the running maximum, sum and mix follow."""
    for r in range(rows):
        if softcap > 0:
            for t in range(first, last):
                s[r, t] = softcap * np.tanh(s[r, t] / softcap)
        for t in range(first):
            s[r, t] = _MASKED
        for t in range(last, n):
            s[r, t] = _MASKED
        at = s_at + r * s_stride
        best = largest(at, n)
        if best > m[r]:
            shrink = np.float32(np.exp(m[r] - best))
            total[r] *= shrink
            for d in range(acc.shape[1]):
                acc[r, d] *= shrink
            m[r] = best
        total[r] += exponentials(at, n, m[r])


def _stretch(spec_at, table_at, seq, g, rows, q, lo, hi, blocked, state, softcap):  # type: ignore[no-untyped-def]
    """Absorb positions lo ... hi-1 of one sequence and one KV head into the state of ``rows`` query heads.

    table_at, q and state are addresses: the sequence's block table, the (rows, Dk) scaled queries and the
    workspace (``workspace_size``), which begins with m, total (MAX_ROWS each) and acc (MAX_ROWS, Dv): the running
    maximum, sum and mix.
    """
    spec = carray(as_pointer(spec_at), cells.N_SPEC, np.int64)
    dims_k, dims_v, ring, n_grids = (
        spec[cells.DIMS_K],
        spec[cells.DIMS_V],
        spec[cells.RECENT_TOKENS],
        spec[cells.V_GRIDS],
    )
    block = spec[cells.BLOCK]
    table = carray(as_pointer(table_at), -(-hi // block), np.int32)
    m = carray(as_pointer(state), MAX_ROWS, np.float32)
    total = carray(as_pointer(state + 4 * MAX_ROWS), MAX_ROWS, np.float32)
    acc_at = state + 8 * MAX_ROWS
    acc = carray(as_pointer(acc_at), (MAX_ROWS, dims_v), np.float32)
    tile = max(TILE, block)
    s_at = acc_at + 4 * MAX_ROWS * dims_v
    s = carray(as_pointer(s_at), (MAX_ROWS, tile), np.float32)
    shifts_at = s_at + 4 * MAX_ROWS * tile
    shifts = carray(as_pointer(shifts_at), MAX_ROWS, np.float32)
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
            n_runs = min(max(1, TILE // block), -(-end // block) - first_block)
            start = first_block * block
            last = min(end - start, n_runs * block)
        else:
            kind, k_row, v_row = spec[cells.RECENT_KIND], spec[cells.RECENT_K_ROW], spec[cells.RECENT_V_ROW]
            slot = pos % ring // 8 * 8
            start = pos - pos % ring % 8
            n_runs, first_block = 1, 0
            last = min(TILE, hi - start, ring - slot)
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
            if kind <= _BF16:
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
            if kind > _BF16:
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


@njit(cache=True, error_model="numpy")
def workspace_size(spec):  # type: ignore[no-untyped-def]
    """float32 numbers that one task needs: m, total, acc, scores, shifts, scaled queries, weights by grid, queries."""
    tile = max(TILE, spec[cells.BLOCK])
    return MAX_ROWS * (3 + spec[cells.DIMS_V] + 2 * spec[cells.DIMS_K] + tile * (1 + spec[cells.V_GRIDS]))


@njit(cache=True, error_model="numpy")
def _task(task, n_splits, n_passes, stretch, spec, tables, rows, q, n_sinks, scale, softcap, states):  # type: ignore[no-untyped-def]
    """One (query row, KV head, pass over its query heads, stretch of tokens)."""
    n_groups, dims = spec[cells.N_GROUPS], q.shape[2]
    split = task % n_splits
    part = (task // n_splits) % n_passes
    g = (task // (n_splits * n_passes)) % n_groups
    row = task // (n_splits * n_passes * n_groups)
    per_group = q.shape[1] // n_groups
    per_pass = -(-per_group // n_passes)
    head = g * per_group + part * per_pass
    n_heads = min(per_pass, per_group - part * per_pass)
    state = states[task]
    heads = state.shape[0] - MAX_ROWS * dims
    state[: MAX_ROWS * (2 + spec[cells.DIMS_V])] = 0
    for r in range(n_heads):
        state[r] = _MASKED
        for d in range(dims):
            state[heads + r * dims + d] = q[row, head + r, d] * scale
    seq, first, last, blocked = rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3]
    step = (last - first + n_splits * TILE - 1) // (n_splits * TILE) * TILE
    lo, hi = first + split * step, min(last, first + (split + 1) * step)
    at = spec.ctypes.data, tables[seq].ctypes.data, seq, g, n_heads, state.ctypes.data + 4 * heads
    if split == 0 and first > 0 and n_sinks > 0:
        call_stretch(stretch, *at, 0, min(n_sinks, first), blocked, state.ctypes.data, softcap)
    if lo < hi:
        call_stretch(stretch, *at, lo, hi, blocked, state.ctypes.data, softcap)


@njit(cache=True, error_model="numpy")
def _merge(n_splits, n_passes, n_groups, states, out):  # type: ignore[no-untyped-def]
    """softmax over all stretches from the softmax over each: weigh by exp(m - max m)."""
    per_group, dims = out.shape[1] // n_groups, out.shape[2]
    per_pass = -(-per_group // n_passes)
    for row in range(out.shape[0]):
        for head in range(out.shape[1]):
            g, inside = head // per_group, head % per_group
            first = ((row * n_groups + g) * n_passes + inside // per_pass) * n_splits
            r = inside % per_pass
            best = _MASKED
            for task in range(first, first + n_splits):
                best = max(best, states[task, r])
            whole = np.float32(0)
            mixed = out[row, head]
            mixed[:] = 0
            for task in range(first, first + n_splits):
                weight = np.float32(np.exp(states[task, r] - best))
                whole += weight * states[task, MAX_ROWS + r]
                at = 2 * MAX_ROWS + r * dims
                for d in range(dims):
                    mixed[d] += weight * states[task, at + d]
            for d in range(dims):
                mixed[d] /= whole


@njit(cache=True, parallel=True, nogil=True, error_model="numpy")
def attend_rows(parallel, n_splits, n_passes, stretch, spec, tables, rows, q, n_sinks, scale, softcap, out):  # type: ignore[no-untyped-def]
    """``attend`` for compiled callers. ``stretch`` is ``stretch_address()``."""
    n_tasks = q.shape[0] * spec[cells.N_GROUPS] * n_passes * n_splits
    states = np.empty((n_tasks, workspace_size(spec)), np.float32)
    if parallel:
        for task in prange(n_tasks):
            _task(task, n_splits, n_passes, stretch, spec, tables, rows, q, n_sinks, scale, softcap, states)
    else:
        for task in range(n_tasks):
            _task(task, n_splits, n_passes, stretch, spec, tables, rows, q, n_sinks, scale, softcap, states)
    _merge(n_splits, n_passes, spec[cells.N_GROUPS], states, out)


@cache
def stretch_address() -> int:
    """Where the compiled inner loop lies. Compiles it on first use (seconds; kept on disk between processes)."""
    signature = types.void(*[types.int64] * 10, types.float32)
    address = cfunc(signature, cache=True, error_model="numpy")(_stretch).address
    assert address is not None
    return address


def attend(
    spec: np.ndarray,
    tables: np.ndarray,
    rows: np.ndarray,
    q: np.ndarray,
    *,
    n_reads: int,
    scale: float,
    n_sinks: int = 0,
    softcap: float | None = None,
) -> np.ndarray:
    """Attention of the query rows (T, H, D) over what ``rows`` lets each see: (T, H, Dv) float32.

    ``n_reads``: stored numbers that will be read, about; it decides whether other threads are worth waking.
    """
    n_groups = int(spec[cells.N_GROUPS])
    n_passes = -(-(q.shape[1] // n_groups) // MAX_ROWS)
    out = np.empty((*q.shape[:2], int(spec[cells.DIMS_V])), np.float32)
    n_threads = numba.get_num_threads()
    parallel = n_reads >= MIN_PARALLEL_READS and n_threads > 1
    n_tasks = q.shape[0] * n_groups * n_passes
    n_splits = max(1, -(-2 * n_threads // n_tasks)) if parallel else 1
    cap = np.float32(softcap or 0.0)
    attend_rows(
        parallel, n_splits, n_passes, stretch_address(), spec, tables, rows, q, n_sinks, np.float32(scale), cap, out
    )
    return out


def compile_now() -> None:
    """Compile what ``attend`` needs, or load it from numba's disk cache, so that no step waits for it."""
    k = np.zeros((8, 16), np.float32)
    at = k.ctypes.data
    spec = make_spec(kind=0, block=8, n_groups=1, dims_k=16, dims_v=16, k=at, v=at, k_row=64, v_row=64)
    attend(spec, np.zeros((1, 1), np.int32), np.array([[0, 0, 8, 8]]), k[None, :1], n_reads=0, scale=1.0)
