# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""A mixture of experts for many tokens: expert after expert, each with all the tokens that visit it."""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.cpu import blocks
from labkit.kernels.cpu.blocks import floats
from labkit.kernels.cpu.cells import EXPERT_DOWN, EXPERT_GATE, EXPERT_UP, FIRST_EXPERT, ROUTER
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.matmul import multiply
from labkit.kernels.cpu.mixture import choose, table
from labkit.kernels.cpu.plan import ACTIVATION, D_EXPERT, N_ACTIVE, N_EXPERTS
from labkit.kernels.cpu.rowwise import array_at
from labkit.kernels.cpu.step import barrier


@jit
def experts(
    layer, x, row, m, n_tokens, y, scores, visits, gathered, gate, up, out, work, team, rank, n_threads, give_way_at
):
    """y (T, M) += the experts' outputs for x (T, M), all rows ``row`` bytes apart, on the whole team.

    scores, visits, gathered, gate, up and out are memory of T rows each (scores and out may be the same); visits holds
    each token's ids, then gates."""
    linears, n_active = table(layer), layer[N_ACTIVE]
    multiply(linears[ROUTER], x, row, n_tokens, scores, row, work, rank, n_threads)
    barrier(team, n_threads, give_way_at)
    for t in range(rank, n_tokens, n_threads):
        ids = visits + t * row
        choose(layer, scores + t * row, ids, ids + 8 * n_active)
    barrier(team, n_threads, give_way_at)
    for e in range(layer[N_EXPERTS]):
        n_here = 0
        for t in range(n_tokens):
            if _visit(visits + t * row, n_active, e) < 0:
                continue
            if n_here % n_threads == rank:
                blocks.copy(x + t * row, m, gathered + n_here * row)
            n_here += 1
        if n_here == 0:  # for every thread
            continue
        own = linears[FIRST_EXPERT + 3 * e : FIRST_EXPERT + 3 * e + 3]
        barrier(team, n_threads, give_way_at)
        multiply(own[EXPERT_GATE], gathered, row, n_here, gate, row, work, rank, n_threads)
        multiply(own[EXPERT_UP], gathered, row, n_here, up, row, work, rank, n_threads)
        barrier(team, n_threads, give_way_at)
        for i in range(rank, n_here, n_threads):
            at = up + i * row
            blocks.activate(layer[ACTIVATION], True, gate + i * row, at, layer[D_EXPERT], at)
        barrier(team, n_threads, give_way_at)
        multiply(own[EXPERT_DOWN], up, row, n_here, out, row, work, rank, n_threads)
        barrier(team, n_threads, give_way_at)
        i = 0
        for t in range(n_tokens):
            j = _visit(visits + t * row, n_active, e)
            if j < 0:
                continue
            if t % n_threads == rank:
                g = floats(visits + t * row + 8 * n_active, n_active)[j]
                total, one = floats(y + t * row, m), floats(out + i * row, m)
                for c in range(m):
                    total[c] += g * one[c]
            i += 1


@jit
def _visit(ids, n_active, e):
    """Which of a token's visits is expert e; -1 when none is."""
    found = carray(array_at(ids), (n_active,), np.int64)
    for j in range(n_active):
        if found[j] == e:
            return j
    return -1
