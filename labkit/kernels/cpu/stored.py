# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Pieces of attention over codes (int8, int4) behind a block table, and over the full-precision ring of the latest
rows.

What a token sees as codes, and what as rows, is its row of the layer's ROWS (T, 4) int64: table row, first visible
position, end, tokens that lie in blocks. ``stretch`` goes through them.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.cpu import stored_spec as cells
from labkit.kernels.cpu.blocks import copy, fill, floats
from labkit.kernels.cpu.cells import BLOCK_TABLE, N_BLOCKS, STRETCH
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.memory import CODED_TILE, workspace_size
from labkit.kernels.cpu.plan import D_HEAD, N_HEADS, N_KV, N_SINKS, ROWS, SOFTCAP, SPEC
from labkit.kernels.cpu.rowwise import array_at
from labkit.kernels.cpu.stored_simd import call_stretch
from labkit.kernels.cpu.stored_spec import MAX_ROWS
from labkit.kernels.cpu.stretch import MASKED


@jit
def tile(layer, numbers, held, t, group, tile, queries, scratch, piece, piece_stride):
    """One token's pieces (``attention``) of a tile of CODED_TILE positions, for the query heads of a group.

    queries (R, D), scaled; scratch: ``workspace_size``."""
    d, n_shared = layer[D_HEAD], layer[N_HEADS] // layer[N_KV]
    spec = carray(array_at(layer[SPEC]), (cells.N_SPEC,), np.int64)
    row = carray(array_at(layer[ROWS] + 32 * t), (4,), np.int64)
    seq, first, last, blocked = row[0], row[1], row[2], row[3]
    table = held[BLOCK_TABLE] + 4 * seq * held[N_BLOCKS]
    lo, hi = max(first, tile * CODED_TILE), min(last, (tile + 1) * CODED_TILE)
    stretch, cap = held[STRETCH], numbers[SOFTCAP]
    size = workspace_size(spec)
    heads = scratch + 4 * (size - MAX_ROWS * d)
    for head in range(0, n_shared, MAX_ROWS):
        n = min(MAX_ROWS, n_shared - head)
        fill(scratch, 0, MAX_ROWS, MASKED)
        fill(scratch, MAX_ROWS, MAX_ROWS * (2 + d), np.float32(0.0))
        copy(queries + 4 * d * head, n * d, heads)
        at = layer[SPEC], table, seq, group, n, heads
        if tile == 0 and first > 0 and layer[N_SINKS] > 0:
            call_stretch(stretch, *at, 0, min(layer[N_SINKS], first), blocked, scratch, cap)
        if lo < hi:
            call_stretch(stretch, *at, lo, hi, blocked, scratch, cap)
        state = floats(scratch, 2 * MAX_ROWS)
        for r in range(n):
            to = piece + (head + r) * piece_stride
            copy(scratch + 4 * (2 * MAX_ROWS + r * d), d, to)
            found = floats(to + 4 * d, 2)
            found[0], found[1] = state[r], state[MAX_ROWS + r]
