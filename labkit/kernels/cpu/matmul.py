# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""The product of packed weights with many tokens, for prefill: out (T, N) = x (T, K) W^T, on the team's threads.

Sixteen rows at a time, and as many of their inputs as the first-level cache holds, become a panel (``panels``) that
all tokens pass (``tiles``). int8 and int4 weights meet tokens rounded to integers, with one step for each 64 inputs:
int16, or bytes where the weights ask for it.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.cpu import blocks, panels, rounding, tiles
from labkit.kernels.cpu.cells import (
    GIVE_WAY,
    INPUT,
    INPUT_STRIDE,
    LINEAR_AT,
    N_CELLS,
    N_INPUTS,
    N_THREADS,
    OUTPUT,
    OUTPUT_STRIDE,
    SCRATCH,
)
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.memory import PANEL_BYTES, ROWS, WORD, own_bytes
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
from labkit.kernels.cpu.products import prepare, product, share
from labkit.kernels.cpu.rowwise import array_at
from labkit.kernels.cpu.step import barrier
from labkit.kernels.packed import TOKEN_BLOCK, TOKEN_LEVELS

PIECES_A_THREAD = 4
"""Into how many pieces a product is cut at least, for each thread: by rows, and by tokens where rows are few."""
FEWEST_TOKENS = 24
"""Fewer tokens are not worth a panel."""


def matmul(rank, team, job):
    """One product: for one token decode's, which reads the weights once as they lie. Every thread calls it."""
    cells = carray(array_at(job), (N_CELLS,), np.int64)
    n_threads, give_way_at = cells[N_THREADS], cells[GIVE_WAY]
    linear = carray(array_at(cells[LINEAR_AT]), (LINEAR,), np.int64)
    n_tokens, x, x_stride = cells[N_INPUTS], cells[INPUT], cells[INPUT_STRIDE]
    if n_tokens == 1:
        padded = (linear[N_IN] + 63) // 64 * 64
        scratch = cells[SCRATCH] + rank * own_bytes(1, padded)
        prepare(linear, x, scratch)
        first, end = share(linear[N_OUT], 4, rank, n_threads)
        product(linear, x, scratch, cells[OUTPUT], first, end)
        barrier(team, n_threads, give_way_at)
        return
    round_tokens(linear, x, x_stride, n_tokens, cells[SCRATCH], rank, n_threads)
    barrier(team, n_threads, give_way_at)
    multiply(linear, x, x_stride, n_tokens, cells[OUTPUT], cells[OUTPUT_STRIDE], cells[SCRATCH], rank, n_threads)
    barrier(team, n_threads, give_way_at)


@jit
def multiply(linear, x, x_stride, n_tokens, out, out_stride, work, rank, n_threads):
    """This thread's part of out (T, N) = x (T, K) W^T + b. For integers, ``round_tokens`` and a barrier come first."""
    kind, n_out = linear[FORMAT], linear[N_OUT]
    padded = (linear[N_IN] + 63) // 64 * 64
    of_bytes = kind == INT8 and linear[GROUP] != 0
    steps = work + n_tokens * 2 * padded
    starts = steps + n_tokens * (padded // 16)
    own = (starts + n_tokens * 4 + 63) // 64 * 64 + rank * own_bytes(n_tokens, padded)
    grid = own + PANEL_BYTES
    spill = grid + padded // 32 * WORD
    n = inputs(linear)
    word = 1  # inputs to a word
    if kind in (INT8, INT4):
        x, x_stride, word = work, 2 * padded, 4 if of_bytes else 2
    narrow = 1 if kind == INT4 and linear[GROUP] == 32 else 0  # blocks of half a step
    grid_stride = WORD if kind == INT4 else 0
    n_chunks = -(-n * WORD // word // PANEL_BYTES)
    unit = 8 if word == 1 else TOKEN_BLOCK  # PANEL_BYTES are whole units of either
    chunk = -(-n // (n_chunks * unit)) * unit
    n_panels = -(-n_out // ROWS)
    n_cuts = max(1, min(n_tokens // FEWEST_TOKENS, -(-PIECES_A_THREAD * n_threads // n_panels)))
    first, end = share(n_panels * n_cuts, 1, rank, n_threads)
    packed = -1
    for piece in range(first, end):
        row, cut = piece // n_cuts * ROWS, piece % n_cuts
        token, stop = n_tokens * cut // n_cuts, n_tokens * (cut + 1) // n_cuts
        to, to_stride = out + token * out_stride + 4 * row, out_stride
        if row + ROWS > n_out:
            to, to_stride = spill, WORD
        for at in range(0, n, chunk):
            n_here = min(chunk, n - at)
            if n_chunks > 1 or packed != row:
                pack(linear, row, at, n_here, of_bytes, own, grid)
                packed = row
            ahead, apart, n_ahead, size = _next(linear, row, at, chunk, n)
            n_tiles = -(-(stop - token) // (6 if word == 1 else 4))
            t, turn = token, 0
            while t < stop:
                asked, shift = ahead_of(turn, n_tiles, ahead, apart, n_ahead)
                fresh = 1 if at == 0 else 0
                here = to + (t - token) * to_stride
                if word == 1:
                    token_at = x + t * x_stride + 4 * at
                    t += tiles.floats(
                        stop - t,
                        (own, WORD, token_at, x_stride, n_here, here, to_stride, fresh, asked, apart, shift, size),
                    )
                else:
                    token_at = x + t * x_stride + at * 4 // word
                    block = (t * (padded // TOKEN_BLOCK) + at // TOKEN_BLOCK) * 4
                    given = (
                        own, token_at, x_stride, n_here // word, (TOKEN_BLOCK >> narrow) // word, grid, grid_stride,
                        starts + 4 * t, steps + block, padded // 16, narrow, here, to_stride, fresh, asked, apart,
                        shift, size,
                    )  # fmt: skip
                    t += tiles.integers(stop - t, of_bytes, given)
                turn += 1
        if row + ROWS > n_out:
            _copy(spill, n_out - row, out + token * out_stride + 4 * row, out_stride, stop - token)
        if linear[BIAS] != 0:
            _add_bias(linear, row, token, stop, out, out_stride)


@jit
def inputs(linear):
    """Inputs as they are stored, padding and all."""
    if linear[FORMAT] == INT4:
        return linear[STRIDE] * 64
    return linear[STRIDE] if linear[FORMAT] == INT8 else linear[N_IN]


@jit
def pack(linear, row, at, n, of_bytes, panel, grid):
    """Inputs [at, at + n) of 16 rows as a panel; for integers the rows' scales too."""
    kind, stride, last = linear[FORMAT], linear[STRIDE], linear[N_OUT] - 1 - row
    if kind == INT4:
        group, four = linear[GROUP], row // 4
        last = (linear[N_OUT] + 3) // 4 - 1 - four
        n_groups = (stride * 64 + group - 1) // group
        w = linear[W] + four * stride * 128
        zeros = linear[ZEROS] + four * n_groups * 4 if linear[ZEROS] != 0 else 0
        panels.pack_int4(w, stride * 128, last, n // 64, zeros, n_groups * 4, at // 64, group, panel)
        size = min(group, TOKEN_BLOCK)
        scales = linear[SCALES] + 2 * four * n_groups * 4
        panels.spread_scales(scales, n_groups, last, at, n // size, size, group, grid)
        return
    w = linear[W] + row * stride
    for half in range(2):
        if kind == INT8 and of_bytes:
            panels.pack_bytes(w + at, stride, last, n, half, panel)
        elif kind == INT8:
            panels.pack_int8(w + at, stride, last, n, half, panel)
        elif kind == BF16:
            panels.pack_bf16(w + 2 * at, stride, last, n, half, panel)
        elif kind == FP32:
            panels.pack_fp32(w + 4 * at, stride, last, n, half, panel)
    if kind != INT8:
        return
    here = carray(array_at(grid), (ROWS,), np.float32)
    scales = carray(array_at(linear[SCALES]), (linear[N_OUT],), np.float32)
    for r in range(ROWS):
        here[r] = scales[min(row + r, linear[N_OUT] - 1)]


@jit
def _next(linear, row, at, chunk, n):
    """The memory of the panel after this one: address, bytes from row to row, rows, and bytes of each that a float (or
    a block of integers) of a panel stands for, as a power of two. Of packed int4 a block's four rows are a row."""
    at += chunk
    if at >= n:
        at, row = 0, row + ROWS
    kind, stride = linear[FORMAT], linear[STRIDE]
    if kind == INT4:
        return linear[W] + row // 4 * stride * 128 + 2 * at, stride * 128, 4, 6 if linear[GROUP] == 32 else 7
    w = linear[W] + row * stride
    if kind == INT8:
        return w + at, stride, ROWS, 6
    return (w + 2 * at, stride, ROWS, 1) if kind == BF16 else (w + 4 * at, stride, ROWS, 2)


@jit
def ahead_of(turn, n_tiles, address, apart, n_rows):
    """Which rows the tile ``turn`` asks for: the first one's address, and how many (2^shift) take turns. The rows are
    shared out among a panel's tiles; those that come after ask for what they have."""
    shift = 0
    while (n_tiles << shift) < n_rows:
        shift += 1
    return address + min(turn << shift, n_rows - 1) * apart, shift


@jit
def _copy(from_, n_rows, out, out_stride, n_tokens):
    """The last panel's rows to where they belong: fewer than 16."""
    for t in range(n_tokens):
        blocks.copy(from_ + t * WORD, n_rows, out + t * out_stride)


@jit
def _add_bias(linear, row, token, stop, out, out_stride):
    n_rows = min(ROWS, linear[N_OUT] - row)
    b = carray(array_at(linear[BIAS] + 4 * row), (n_rows,), np.float32)
    for t in range(token, stop):
        y = carray(array_at(out + t * out_stride + 4 * row), (n_rows,), np.float32)
        for r in range(n_rows):
            y[r] += b[r]


@jit
def round_tokens(linear, x, x_stride, n_tokens, work, rank, n_threads):
    """For packed weights: this thread's share of the tokens to int16 or bytes, a step for each block of inputs."""
    if linear[FORMAT] not in (INT8, INT4):
        return
    n_in = linear[N_IN]
    padded = (n_in + 63) // 64 * 64
    n_blocks = padded // TOKEN_BLOCK
    bytes_too = linear[FORMAT] == INT8 and linear[GROUP] != 0
    limit = np.float32(TOKEN_LEVELS if bytes_too else 32767)
    steps = carray(array_at(work + n_tokens * 2 * padded), (n_tokens, n_blocks), np.float32)
    starts = carray(array_at(work + n_tokens * (2 * padded + padded // 16)), (n_tokens,), np.float32)
    first, end = share(n_tokens, 1, rank, n_threads)
    for token in range(first, end):
        to = work + 2 * padded * token
        starts[token] = 0.0
        for block in range(n_blocks):
            at, n = x + token * x_stride + 4 * TOKEN_BLOCK * block, min(TOKEN_BLOCK, n_in - TOKEN_BLOCK * block)
            top = rounding.top(at, n, np.float32(1e-30))
            steps[token, block] = top / limit
            if bytes_too:
                total = rounding.round_bytes(at, n, limit / top, to + TOKEN_BLOCK * block)
                starts[token] -= steps[token, block] * np.float32(tiles.WEIGHT_OFFSET * total)
            else:
                rounding.round_int16(at, n, limit / top, to + 2 * TOKEN_BLOCK * block)
        tail = carray(array_at(to), (2 * padded,), np.int8)
        size = 1 if bytes_too else 2
        for i in range(size * n_in, size * padded):
            tail[i] = 0  # meets the weights' own zeros
