# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""One product of a weight matrix with one vector, rows [first, end), from whichever form the weights have."""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.cpu import dots
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.plan import BF16, BIAS, FORMAT, FP32, GROUP, INT4, INT8, N_IN, SCALES, STRIDE, ZEROS, W
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
    """Activations as the weights' form wants them: int4 multiplies int16. ``scratch`` holds 4 bytes an input more."""
    if linear[FORMAT] == INT4:
        n = linear[STRIDE] * 64
        narrow = 1 if linear[GROUP] == 32 else 0
        dots.prepare_int4(x, n, scratch, scratch + 2 * n, scratch + 2 * n + n // 8, narrow)


@jit
def product(linear, x, scratch, out, first, end):
    """out[first:end] = W[first:end] x + b; x and out are addresses of float32. int4 rows come in panels of 4."""
    kind, w, stride, n = linear[FORMAT], linear[W], linear[STRIDE], linear[N_IN]
    at = out + 4 * first
    if kind == INT4:
        n_blocks, group = stride, linear[GROUP]
        n = n_blocks * 64
        sums = scratch + 2 * n
        steps = sums + n // 8
        n_groups = (n + group - 1) // group
        shift = 0 if group <= 64 else 1
        for panel in range(first // 4, (end + 3) // 4):
            w_at, cell = w + panel * n_blocks * 128, panel * n_groups * 4
            zeros = linear[ZEROS] + cell if linear[ZEROS] != 0 else 0
            if group == 32:
                dots.dot_int4_g32(w_at, n, scratch, sums, steps, linear[SCALES] + 2 * cell, zeros, 0, out + 16 * panel)
            else:
                dots.dot_int4_wide(
                    w_at, n, scratch, sums, steps, linear[SCALES] + 2 * cell, zeros, shift, out + 16 * panel
                )
    else:
        if kind == INT8:
            for row in range(first, end):
                dots.dot_int8_one(w + row * stride, stride, n, x, out + 4 * row)
            y, scales = carray(array_at(at), (end - first,), np.float32), linear[SCALES] + 4 * first
            s = carray(array_at(scales), (end - first,), np.float32)
            for i in range(end - first):
                y[i] *= s[i]
        elif kind == BF16:
            for row in range(first, end):
                dots.dot_bf16_one(w + row * stride, stride, n, x, out + 4 * row)
        elif kind == FP32:
            for row in range(first, end):
                dots.dot_fp32_one(w + row * stride, stride, n, x, out + 4 * row)
    if linear[BIAS] != 0:
        y = carray(array_at(at), (end - first,), np.float32)
        b = carray(array_at(linear[BIAS] + 4 * first), (end - first,), np.float32)
        for i in range(end - first):
            y[i] += b[i]
