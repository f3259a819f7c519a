"""Attention of a few new tokens over a cache as it is stored: behind a block table, in fp32, bf16, int8 or int4.

    attend(spec, tables, rows, q, n_sinks, scale, softcap, out)

The work is cut by query row, KV head and stretch of tokens (``labkit.kernels.cpu.stretch`` goes through one), so that
one long sequence keeps every core busy (Flash-Decoding), and the partial results are merged.

spec    (len(SPEC),) int64   where one layer's storage lies: ``make_spec``
tables  (n_sequences, max_blocks) int32   physical block of each logical one
rows    (T, 4) int64         for each query row: table row, first visible position, end, tokens that lie in blocks
q, out  (T, H, D), (T, H, Dv) float32
"""

from __future__ import annotations

import numba
import numpy as np
from numba import carray, njit, prange

from labkit.kernels.cpu import machine_code
from labkit.kernels.cpu import stored_spec as cells
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.memory import STORED_TILE, workspace_size
from labkit.kernels.cpu.rowwise import array_at
from labkit.kernels.cpu.stored_simd import call_stretch
from labkit.kernels.cpu.stored_spec import MAX_ROWS, make_spec, why_not
from labkit.kernels.cpu.stretch import MASKED

__all__ = ["attend", "compile_now", "make_spec", "why_not"]

MIN_PARALLEL_READS = 1 << 17
"""Stored numbers below which handing work to other threads costs more than it saves."""


@jit
def take(  # type: ignore[no-untyped-def]
    task, n_splits, n_passes, stretch, spec, tables, rows, q, q_row, n_heads_all, n_sinks, scale, softcap, states
):
    """One (query row, KV head, pass over its query heads, stretch of tokens), into its row of ``states``.

    q is the address of the queries, (T, H, D) with rows ``q_row`` bytes apart."""
    n_groups, dims = spec[cells.N_GROUPS], spec[cells.DIMS_K]
    split = task % n_splits
    part = (task // n_splits) % n_passes
    g = (task // (n_splits * n_passes)) % n_groups
    row = task // (n_splits * n_passes * n_groups)
    per_group = n_heads_all // n_groups
    per_pass = -(-per_group // n_passes)
    head = g * per_group + part * per_pass
    n_heads = min(per_pass, per_group - part * per_pass)
    state = states[task]
    heads = state.shape[0] - MAX_ROWS * dims
    state[: MAX_ROWS * (2 + spec[cells.DIMS_V])] = 0
    queries = carray(array_at(q + row * q_row + 4 * dims * head), n_heads * dims, np.float32)
    for r in range(n_heads):
        state[r] = MASKED
        for d in range(dims):
            state[heads + r * dims + d] = queries[r * dims + d] * scale
    seq, first, last, blocked = rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3]
    step = (last - first + n_splits * STORED_TILE - 1) // (n_splits * STORED_TILE) * STORED_TILE
    lo, hi = first + split * step, min(last, first + (split + 1) * step)
    at = spec.ctypes.data, tables[seq].ctypes.data, seq, g, n_heads, state.ctypes.data + 4 * heads
    if split == 0 and first > 0 and n_sinks > 0:
        call_stretch(stretch, *at, 0, min(n_sinks, first), blocked, state.ctypes.data, softcap)
    if lo < hi:
        call_stretch(stretch, *at, lo, hi, blocked, state.ctypes.data, softcap)


@jit
def merge(row, n_splits, n_passes, n_groups, n_heads, dims, states, out):  # type: ignore[no-untyped-def]
    """softmax over all stretches from the softmax over each: weigh by exp(m - max m). One row's heads, (H, Dv) at the
    address ``out``."""
    per_group = n_heads // n_groups
    per_pass = -(-per_group // n_passes)
    for head in range(n_heads):
        g, inside = head // per_group, head % per_group
        first = ((row * n_groups + g) * n_passes + inside // per_pass) * n_splits
        r = inside % per_pass
        best = MASKED
        for task in range(first, first + n_splits):
            best = max(best, states[task, r])
        whole = np.float32(0)
        mixed = carray(array_at(out + 4 * dims * head), dims, np.float32)
        for d in range(dims):
            mixed[d] = 0
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
    """``attend`` for compiled callers. ``stretch`` is ``machine_code.address("stretch")``."""
    n_tasks = q.shape[0] * spec[cells.N_GROUPS] * n_passes * n_splits
    states = np.empty((n_tasks, workspace_size(spec)), np.float32)
    n_heads, at, q_row = q.shape[1], q.ctypes.data, 4 * q.shape[1] * q.shape[2]
    if parallel:
        for task in prange(n_tasks):
            take(
                task, n_splits, n_passes, stretch, spec, tables, rows, at, q_row, n_heads, n_sinks, scale, softcap,
                states,
            )  # fmt: skip
    else:
        for task in range(n_tasks):
            take(
                task, n_splits, n_passes, stretch, spec, tables, rows, at, q_row, n_heads, n_sinks, scale, softcap,
                states,
            )  # fmt: skip
    for row in range(q.shape[0]):
        merge(row, n_splits, n_passes, spec[cells.N_GROUPS], n_heads, out.shape[2], states, out[row].ctypes.data)


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
    cap, stretch = np.float32(softcap or 0.0), machine_code.address("stretch")
    attend_rows(
        parallel,
        n_splits,
        n_passes,
        stretch,
        spec,
        tables,
        rows,
        q,
        n_sinks,
        np.float32(scale),
        cap,
        out,
    )
    return out


def compile_now() -> None:
    """Compile what ``attend`` needs, or load it from numba's disk cache, so that no step waits for it."""
    k = np.zeros((8, 16), np.float32)
    at = k.ctypes.data
    spec = make_spec(kind=0, block=8, n_groups=1, dims_k=16, dims_v=16, k=at, v=at, k_row=64, v_row=64)
    attend(spec, np.zeros((1, 1), np.int32), np.array([[0, 0, 8, 8]]), k[None, :1], n_reads=0, scale=1.0)
