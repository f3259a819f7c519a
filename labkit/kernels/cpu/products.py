# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""One product of a weight matrix with one vector, rows [first, end), from whichever form the weights have."""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.cpu import dots, rounding
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.memory import ROWS, record_bytes
from labkit.kernels.cpu.panel_product import one_panel
from labkit.kernels.cpu.plan import BF16, BIAS, FORMAT, N_IN, PACKED, ROUNDS, STRIDE, W
from labkit.kernels.cpu.rowwise import array_at


@jit
def share(n, unit, rank, n_threads):
    """This thread's part of n rows: [first, end), whole units."""
    units = (n + unit - 1) // unit
    first = (units * rank) // n_threads * unit
    end = (units * (rank + 1)) // n_threads * unit
    return min(first, n), min(end, n)


@jit
def prepare(linear, x, scratch):
    """The token as packed weights want it; ``scratch`` holds its record and a thread's own memory for a product."""
    if linear[ROUNDS] != 0:
        rounding.round_token(x, linear[N_IN], linear[ROUNDS], scratch)


@jit
def product(linear, x, scratch, out, first, end):
    """out[first:end] = W[first:end] x + b; x and out are addresses of float32. Shares are whole panels of 16."""
    if linear[FORMAT] == PACKED:
        own = (scratch + record_bytes(linear[N_IN]) + 63) // 64 * 64
        for panel in range(first // ROWS, (end + ROWS - 1) // ROWS):
            one_panel(linear, panel, scratch, 1, out, 0, own)
        return
    w, stride, n = linear[W], linear[STRIDE], linear[N_IN]
    for row in range(first, end):
        if linear[FORMAT] == BF16:
            dots.dot_bf16_one(w + row * stride, stride, n, x, out + 4 * row)
        else:
            dots.dot_fp32_one(w + row * stride, stride, n, x, out + 4 * row)
    if linear[BIAS] != 0:
        y = carray(array_at(out + 4 * first), (end - first,), np.float32)
        b = carray(array_at(linear[BIAS] + 4 * first), (end - first,), np.float32)
        for i in range(end - first):
            y[i] += b[i]
