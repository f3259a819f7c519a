# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""A mixture of experts inside a compiled step: expert after expert, each with all the tokens that visit it.

The shared expert, where a family has one, is the layer's own FFN; here it is only weighed (``model.moe`` is the
reference). A layer's table of experts: the router, the shared expert's gate (W 0: none), then gate, up and down of
each.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray

from labkit.kernels.cpu import blocks
from labkit.kernels.cpu.barrier import barrier
from labkit.kernels.cpu.blocks import floats
from labkit.kernels.cpu.cells import EXPERT_DOWN, EXPERT_GATE, EXPERT_UP, FIRST_EXPERT, ROUTER, SHARED_GATE
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.matmul import multiply, round_tokens
from labkit.kernels.cpu.plan import ACTIVATION, D_EXPERT, EXPERTS, LINEAR, N_ACTIVE, N_EXPERTS, RENORMALIZE, W
from labkit.kernels.cpu.rowwise import array_at


@jit
def _table(layer):
    """The layer's linears: (2 + 3 E, LINEAR)."""
    return carray(array_at(layer[EXPERTS]), (FIRST_EXPERT + 3 * layer[N_EXPERTS], LINEAR), np.int64)


@jit
def _choose(layer, scores, ids, gates):
    """The N_ACTIVE largest of scores (E,), which are used up: ids (k,) int64 and gates (k,) float32, at addresses."""
    n_active = layer[N_ACTIVE]
    s, found = floats(scores, layer[N_EXPERTS]), carray(array_at(ids), (n_active,), np.int64)
    g = floats(gates, n_active)
    top, total = s[0], np.float32(0.0)
    for e in range(1, layer[N_EXPERTS]):
        top = max(top, s[e])
    for e in range(layer[N_EXPERTS]):
        s[e] = np.float32(math.exp(s[e] - top))
        total += s[e]
    kept = np.float32(0.0)
    for j in range(n_active):
        best = 0
        for e in range(layer[N_EXPERTS]):
            if s[e] > s[best]:
                best = e
        found[j], g[j] = best, s[best] / total
        kept += g[j]
        s[best] = -1.0
    if layer[RENORMALIZE] != 0:
        for j in range(n_active):
            g[j] /= kept


@jit
def weigh_shared(layer, x, row, m, y, n_tokens, scratch, work, rank, n_threads):
    """This thread's tokens of y (T, M), the shared expert's outputs for x (T, M), by how much each counts: all, where
    it has no gate, nothing where there is no shared expert. scratch takes 16 numbers, work what one product does."""
    gate, shares = _table(layer)[SHARED_GATE], floats(scratch, 16)
    for t in range(rank, n_tokens, n_threads):
        if gate[W] == 0:
            continue
        round_tokens(gate, x + t * row, row, 1, work, 0, 1)
        multiply(gate, x + t * row, row, 1, scratch, 64, work, 0, 1)
        weight = np.float32(1.0) / (np.float32(1.0) + np.float32(math.exp(-shares[0])))
        shared = floats(y + t * row, m)
        for i in range(m):
            shared[i] *= weight


@jit
def experts(
    layer, x, row, m, n_tokens, y, scores, visits, gathered, gate, up, out, work, team, rank, n_threads, give_way_at
):
    """y (T, M) += the experts' outputs for x (T, M), all rows ``row`` bytes apart, on the whole team.

    scores, visits, gathered, gate, up and out are memory of T rows each that the team shares (scores and out may be the
    same); visits holds each token's ids, then gates; x may be each thread's own."""
    linears, n_active = _table(layer), layer[N_ACTIVE]
    multiply(linears[ROUTER], x, row, n_tokens, scores, row, work, rank, n_threads)
    barrier(team, n_threads, give_way_at)
    for t in range(rank, n_tokens, n_threads):
        ids = visits + t * row
        _choose(layer, scores + t * row, ids, ids + 8 * n_active)
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
