# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""The product of weights with any number of tokens: out (T, N) = x (T, K) W^T + b, on the team's threads.

    round_tokens | multiply        ( | is a barrier; plain weights need neither the first nor the barrier)

Sixteen rows at a time (``panel_product``), each output in a lane of its own. Every output is summed up in one order,
whatever the number of tokens, threads and pieces, so a token's numbers do not depend on its company.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.cpu import rounding
from labkit.kernels.cpu.barrier import barrier
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
from labkit.kernels.cpu.memory import ROWS, own_bytes, record_bytes
from labkit.kernels.cpu.panel_product import one_panel, one_plain_panel
from labkit.kernels.cpu.plain_rows import MOST_TOKENS, rows_as_they_lie
from labkit.kernels.cpu.plan import FORMAT, LINEAR, N_IN, N_OUT, PACKED, ROUNDS
from labkit.kernels.cpu.products import share
from labkit.kernels.cpu.rowwise import array_at

PIECES_A_THREAD = 4
"""Into how many pieces a product is cut at least, for each thread: by rows, and by tokens where rows are few."""
FEWEST_TOKENS = 24
"""Fewer tokens are not worth a panel."""


def matmul(rank, team, job):
    """One product. Every thread calls it."""
    cells = carray(array_at(job), (N_CELLS,), np.int64)
    n_threads, give_way_at = cells[N_THREADS], cells[GIVE_WAY]
    linear = carray(array_at(cells[LINEAR_AT]), (LINEAR,), np.int64)
    n_tokens, x, x_stride = cells[N_INPUTS], cells[INPUT], cells[INPUT_STRIDE]
    if linear[ROUNDS] != 0:
        round_tokens(linear, x, x_stride, n_tokens, cells[SCRATCH], rank, n_threads)
        barrier(team, n_threads, give_way_at)
    multiply(linear, x, x_stride, n_tokens, cells[OUTPUT], cells[OUTPUT_STRIDE], cells[SCRATCH], rank, n_threads)
    barrier(team, n_threads, give_way_at)


@jit
def round_tokens(linear, x, x_stride, n_tokens, work, rank, n_threads):
    """For packed weights: this thread's share of the tokens, rounded, to ``work``."""
    if linear[ROUNDS] == 0:
        return
    record = record_bytes(linear[N_IN])
    first, end = share(n_tokens, 1, rank, n_threads)
    for token in range(first, end):
        rounding.round_token(x + token * x_stride, linear[N_IN], linear[ROUNDS], work + token * record)


@jit
def multiply(linear, x, x_stride, n_tokens, out, out_stride, work, rank, n_threads):
    """This thread's part of out (T, N) = x (T, K) W^T + b. For packed weights ``round_tokens`` and a barrier come
    first: x is then what that left in ``work``."""
    record = record_bytes(linear[N_IN])
    own = (work + n_tokens * record + 63) // 64 * 64 + rank * (own_bytes(n_tokens) // 64 * 64)
    n_panels = (linear[N_OUT] + ROWS - 1) // ROWS
    n_cuts = max(1, min(n_tokens // FEWEST_TOKENS, -(-PIECES_A_THREAD * n_threads // n_panels)))
    first, end = share(n_panels * n_cuts, 1, rank, n_threads)
    for piece in range(first, end):
        panel, cut = piece // n_cuts, piece % n_cuts
        token, stop = n_tokens * cut // n_cuts, n_tokens * (cut + 1) // n_cuts
        here = out + token * out_stride
        if linear[FORMAT] == PACKED:
            one_panel(linear, panel, work + token * record, stop - token, here, out_stride, own)
        elif n_tokens <= MOST_TOKENS:
            rows_as_they_lie(linear, panel, x, x_stride, n_tokens, out, out_stride, own)
        else:
            one_plain_panel(linear, panel, x + token * x_stride, x_stride, stop - token, here, out_stride, own)
