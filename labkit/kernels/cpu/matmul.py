# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""The product of packed weights with many tokens, for prefill: out (T, N) = x (T, K) W^T, on the team's threads.

Each thread takes a share of the rows. Four rows are unpacked once into memory that stays in the first-level cache and
meet a block of tokens that stays in the second; the tile keeps 12 sums in registers.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from labkit.kernels.cpu import tiles
from labkit.kernels.cpu.plan import (
    BF16,
    BIAS,
    FORMAT,
    FP32,
    GROUP,
    INT4,
    INT8,
    LINEAR,
    N_IN,
    N_OUT,
    SCALES,
    STRIDE,
    ZEROS,
    W,
)
from labkit.kernels.cpu.products import options, prepare, product, share
from labkit.kernels.cpu.rowwise import array_at
from labkit.kernels.cpu.step import GIVE_WAY, N_THREADS, barrier
from labkit.kernels.packed import TOKEN_LEVELS

LINEAR_AT, X, X_STRIDE, OUT, OUT_STRIDE, N_TOKENS, WORK = range(4, 11)
"""Cells of a product's job; the first four are the team's. Strides in bytes."""
AHEAD_ROWS = 8
"""How far ahead of the rows that are multiplied the next are asked for: arithmetic then hides the memory."""
TOKENS = 96
"""Tokens that meet an unpacked panel before the next is unpacked."""


def work_bytes(n_tokens: int, n_in: int, n_threads: int) -> int:
    """Memory of one product: int16 activations and their steps, and a panel for each thread."""
    padded = (n_in + 63) // 64 * 64
    return n_tokens * (2 * padded + 4) + 64 + n_threads * (16 * padded + 256) + 256


def matmul(rank, team, job):
    """One product: for one token decode's, which reads the weights once as they lie. Every thread calls it."""
    cells = carray(array_at(job), (12,), np.int64)
    n_threads, give_way_at = cells[N_THREADS], cells[GIVE_WAY]
    linear = carray(array_at(cells[LINEAR_AT]), (LINEAR,), np.int64)
    n_tokens, x, x_stride = cells[N_TOKENS], cells[X], cells[X_STRIDE]
    if n_tokens == 1:
        padded = (linear[N_IN] + 63) // 64 * 64
        scratch = cells[WORK] + rank * (16 * padded + 256)
        prepare(linear, x, scratch)
        first, end = share(linear[N_OUT], 4, rank, n_threads)
        product(linear, x, scratch, cells[OUT], first, end)
        barrier(team, n_threads, give_way_at)
        return
    round_tokens(linear, x, x_stride, n_tokens, cells[WORK], rank, n_threads)
    barrier(team, n_threads, give_way_at)
    multiply(linear, x, x_stride, n_tokens, cells[OUT], cells[OUT_STRIDE], cells[WORK], rank, n_threads)
    barrier(team, n_threads, give_way_at)


@njit(**options)
def multiply(linear, x, x_stride, n_tokens, out, out_stride, work, rank, n_threads):
    """This thread's rows of out (T, N) = x (T, K) W^T + b. For int8, ``round_tokens`` and a barrier come first."""
    kind, n_in = linear[FORMAT], linear[N_IN]
    padded = (n_in + 63) // 64 * 64
    n = padded if kind == INT4 else n_in
    steps = work + n_tokens * 2 * padded
    panel = (steps + 4 * n_tokens + 63) // 64 * 64 + rank * (16 * padded + 256)
    of_four = panel + 16 * padded  # what an integer tile needs of its rows: scales, sums
    of_bytes = kind == INT8 and linear[GROUP] != 0 and n_tokens > 1
    if kind == INT8:
        n, x, x_stride = linear[STRIDE], work, 2 * padded
    row_bytes = 32 * linear[STRIDE] if kind == INT4 else linear[STRIDE]
    first, end = share(linear[N_OUT], 4, rank, n_threads)
    for token in range(0, n_tokens, TOKENS):
        n_here = min(TOKENS, n_tokens - token)
        for row in range(first, end, 4):
            ahead = linear[W] + (row + AHEAD_ROWS) * row_bytes if token == 0 else 0
            at, to = x + token * x_stride, out + token * out_stride + 4 * row
            if of_bytes and row + 4 <= linear[N_OUT]:
                rows = linear[W] + row * linear[STRIDE]  # the weights are read as they lie
            else:
                _unpack(linear, row, n, panel, of_bytes)
                rows = panel
            if kind == INT8:
                _describe_rows(linear, row, of_four, of_bytes)
                _panel_integer(
                    of_bytes, rows, at, x_stride, n, of_four, steps + 4 * token, to, out_stride, n_here, ahead
                )
            else:
                _panel(rows, at, x_stride, n, to, out_stride, n_here, ahead, row_bytes)
            if linear[BIAS] != 0:
                _add_bias(linear, row, token, token + n_here, out, out_stride)


@njit(**options)
def _add_bias(linear, row, token, stop, out, out_stride):
    n_rows = min(4, linear[N_OUT] - row)
    b = carray(array_at(linear[BIAS] + 4 * row), (n_rows,), np.float32)
    for t in range(token, stop):
        y = carray(array_at(out + t * out_stride + 4 * row), (n_rows,), np.float32)
        for r in range(n_rows):
            y[r] += b[r]


@njit(**options)
def round_tokens(linear, x, x_stride, n_tokens, work, rank, n_threads):
    """For int8: this thread's share of the tokens to int16 (W8A8: to bytes), with one step a token. Nothing for the
    other forms."""
    if linear[FORMAT] != INT8:
        return
    n_in = linear[N_IN]
    padded = (n_in + 63) // 64 * 64
    bytes_too = linear[GROUP] != 0 and n_tokens > 1
    limit = np.float32(min(32767, 2147483647 // (127 * n_in)))  # a sum of n_in products stays within int32
    if bytes_too:
        limit = np.float32(TOKEN_LEVELS)
    step = carray(array_at(work + n_tokens * 2 * padded), (n_tokens,), np.float32)
    first, end = share(n_tokens, 1, rank, n_threads)
    for token in range(first, end):
        at, to = x + token * x_stride, work + 2 * padded * token
        top = tiles.peak(at, n_in)
        if top < np.float32(1e-30):  # not max(): a NaN must stay one
            top = np.float32(1e-30)
        step[token] = top / limit
        if bytes_too:
            tiles.round_bytes(at, n_in, limit / top, to)
            tail = carray(array_at(to), (padded,), np.int8)
            for i in range(n_in, padded):
                tail[i] = 0  # meets the weights' own zeros
            continue
        tiles.round_int16(at, n_in, limit / top, to)
        rest = carray(array_at(to), (padded,), np.int16)
        for i in range(n_in, padded):
            rest[i] = 0


@njit(**options)
def _unpack(linear, row, n, panel, of_bytes):
    """Four rows: int16 (or as they are) for int8 weights, float32 for all others. The last row fills a short panel."""
    kind, w, stride = linear[FORMAT], linear[W], linear[STRIDE]
    if kind == INT4:
        n_groups = (n + linear[GROUP] - 1) // linear[GROUP]
        cell = row * n_groups
        zeros = linear[ZEROS] + cell if linear[ZEROS] != 0 else 0
        tiles.unpack_int4(w + row * stride * 32, stride, linear[SCALES] + 2 * cell, zeros, linear[GROUP], panel)
        return
    for r in range(4):
        at = w + min(row + r, linear[N_OUT] - 1) * stride
        if of_bytes:
            as_they_are = carray(array_at(panel + r * n), (n,), np.int8)
            as_they_are[:] = carray(array_at(at), (n,), np.int8)
        elif kind == INT8:
            tiles.unpack_int8(at, n, panel + r * n * 2)
        elif kind == BF16:
            tiles.unpack_bf16(at, n, panel + r * n * 4)
        elif kind == FP32:
            to = carray(array_at(panel + r * n * 4), (n,), np.float32)
            to[:] = carray(array_at(at), (n,), np.float32)


@njit(**options)
def _describe_rows(linear, row, of_four, of_bytes):
    """Four rows' scales, and for bytes their sums, for the integer tiles."""
    here = carray(array_at(of_four), (4,), np.float32)
    stored = carray(array_at(linear[SCALES]), (linear[N_OUT],), np.float32)
    for r in range(4):
        here[r] = stored[min(row + r, linear[N_OUT] - 1)]
    if of_bytes:
        sums = carray(array_at(of_four + 16), (4,), np.int32)
        all_sums = carray(array_at(linear[ZEROS]), (linear[N_OUT],), np.int32)
        for r in range(4):
            sums[r] = all_sums[min(row + r, linear[N_OUT] - 1)]


@njit(**options)
def _panel_integer(of_bytes, rows, x, x_stride, n, of_four, steps, out, out_stride, n_tokens, ahead):
    sums, t = of_four + 16, 0
    while t + 2 <= n_tokens:
        at, to, step = x + t * x_stride, out + t * out_stride, steps + 4 * t
        later = _later(ahead, rows, t // 2, n)
        if of_bytes:
            tiles.tile_bytes_2(rows, at, x_stride, n, of_four, sums, step, to, out_stride, later)
        else:
            tiles.tile_int16_2(rows, at, x_stride, n, of_four, sums, step, to, out_stride, later)
        t += 2
    if t < n_tokens:
        at, to, step = x + t * x_stride, out + t * out_stride, steps + 4 * t
        later = _later(ahead, rows, t // 2, n)
        if of_bytes:
            tiles.tile_bytes_1(rows, at, x_stride, n, of_four, sums, step, to, out_stride, later)
        else:
            tiles.tile_int16_1(rows, at, x_stride, n, of_four, sums, step, to, out_stride, later)


@njit(**options)
def _panel(panel, x, x_stride, n, out, out_stride, n_tokens, ahead, row_bytes):
    t = 0
    while t + 3 <= n_tokens:
        later = _later(ahead, panel, t // 3, row_bytes)
        tiles.tile_fp32_3(panel, x + t * x_stride, x_stride, n, out + t * out_stride, out_stride, later)
        t += 3
    while t < n_tokens:
        tiles.tile_fp32_1(panel, x + t * x_stride, x_stride, n, out + t * out_stride, out_stride, panel)
        t += 1


@njit(**options)
def _later(ahead, here, tile, row_bytes):
    """What a panel's tile asks for: each of the first four a row of ``ahead`` (0: nothing), the others what is here."""
    return ahead + tile * row_bytes if ahead != 0 and tile < 4 else here
