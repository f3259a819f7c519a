# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Where a compiled step begins and ends when it chooses by itself: a token's row, and the most likely next token.

look_up    a row of the embedding
largest    of this thread's share of the logits
choose     of all shares
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray

from labkit.kernels.cpu import rowwise
from labkit.kernels.cpu.blocks import copy, floats
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.plan import BF16, FP32
from labkit.kernels.cpu.rowwise import array_at

KIND, ROWS, ROW_BYTES, SCALES, ROUNDED = range(5)
"""Cells of a table: how its numbers are held, their address and a row's bytes; of bytes, the rows' scales, and whether
what comes out is rounded to bf16, as a model of that dtype has it."""
N_TABLE = 5
NONE = -1
"""No token: a logit is not finite."""


@jit
def look_up(table, token, m, to):
    """The token's row, (M,) float32 to an address; M a multiple of 8."""
    cells = carray(array_at(table), (N_TABLE,), np.int64)
    row = cells[ROWS] + token * cells[ROW_BYTES]
    if cells[KIND] == FP32:
        copy(row, m, to)
    elif cells[KIND] == BF16:
        rowwise.widen_bf16(row, m, to)
    else:
        numbers, y = carray(array_at(row), (m,), np.int8), floats(to, m)
        scale = floats(cells[SCALES] + 4 * token, 1)[0]
        for i in range(m):
            y[i] = np.float32(numbers[i]) * scale
        if cells[ROUNDED] != 0:
            bits = carray(array_at(to), (m,), np.uint32)
            for i in range(m):
                kept = bits[i] + np.uint32(0x7FFF) + ((bits[i] >> np.uint32(16)) & np.uint32(1))
                bits[i] = kept & np.uint32(0xFFFF0000)


@jit
def largest(logits, first, end, to):
    """Index (int64) and value (float32, 8 bytes on) of the first largest logit in [first, end), to an address."""
    x = floats(logits, end)
    best, at = np.float32(-np.inf), NONE
    for i in range(first, end):
        if not (x[i] <= best):
            best, at = x[i], i
            if math.isnan(best):
                break
    carray(array_at(to), (1,), np.int64)[0] = at
    floats(to + 8, 1)[0] = best


@jit
def choose(found, stride, n_threads):
    """The token of the largest logit of all threads' shares, ``stride`` bytes apart; NONE where it is not finite."""
    best, chosen = np.float32(-np.inf), NONE
    for rank in range(n_threads):
        at = found + rank * stride
        value = floats(at + 8, 1)[0]
        if not (value <= best):
            best, chosen = value, carray(array_at(at), (1,), np.int64)[0]
            if math.isnan(value):
                break
    return chosen if math.isfinite(best) else NONE
