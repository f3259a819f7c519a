# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""A mixture of experts inside a compiled step: which experts a token visits, and what they add for one token.

    route | hidden | add        ( | is a barrier; each thread takes a share of the rows)

Many tokens: ``mixture_run``. The shared expert, where a family has one, is the layer's own FFN; here it is only
weighed (``model.moe`` is the reference). A layer's table of experts: the router, the shared expert's gate (W 0: none),
then gate, up and down of each.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray

from labkit.kernels.cpu import blocks
from labkit.kernels.cpu.blocks import floats
from labkit.kernels.cpu.cells import EXPERT_DOWN, EXPERT_GATE, EXPERT_UP, FIRST_EXPERT, ROUTER, SHARED_GATE
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.plan import ACTIVATION, D_EXPERT, EXPERTS, LINEAR, N_ACTIVE, N_EXPERTS, RENORMALIZE, W
from labkit.kernels.cpu.products import product, share
from labkit.kernels.cpu.rowwise import array_at


@jit
def table(layer):
    """The layer's linears: (2 + 3 E, LINEAR)."""
    return carray(array_at(layer[EXPERTS]), (FIRST_EXPERT + 3 * layer[N_EXPERTS], LINEAR), np.int64)


@jit
def choose(layer, scores, ids, gates):
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
def route(layer, x, scores, rank, n_threads):
    """This thread's share of the router's scores (E,) for x (M,)."""
    first, end = share(layer[N_EXPERTS], 16, rank, n_threads)
    product(table(layer)[ROUTER], x, 0, scores, first, end)


@jit
def weigh_shared(layer, x, scratch, y, first, end):
    """y[first:end], the shared expert's output for x (M,), by how much it counts: all, where it has no gate."""
    gate = table(layer)[SHARED_GATE]
    if gate[W] == 0:
        return
    product(gate, x, 0, scratch, 0, 1)
    weight = np.float32(1.0) / (np.float32(1.0) + np.float32(math.exp(-floats(scratch, 1)[0])))
    shared = floats(y, end)
    for i in range(first, end):
        shared[i] *= weight


@jit
def hidden(layer, x, scores, ids, gates, scratch, rank, n_threads):
    """The experts of x (M,): their ids and gates (this thread's own), and a share of each one's hidden layer, which lie
    behind ``scores`` (E,). ``scratch`` takes E, or twice an expert's width."""
    n_experts, wide = layer[N_EXPERTS], 4 * ((layer[D_EXPERT] + 63) // 64 * 64)
    blocks.copy(scores, n_experts, scratch)
    choose(layer, scratch, ids, gates)
    linears, out = table(layer), scores + 4 * ((n_experts + 63) // 64 * 64)
    first, end = share(layer[D_EXPERT], 16, rank, n_threads)
    for e in carray(array_at(ids), (layer[N_ACTIVE],), np.int64):
        own = linears[FIRST_EXPERT + 3 * e : FIRST_EXPERT + 3 * e + 3]
        product(own[EXPERT_GATE], x, 0, scratch, first, end)
        product(own[EXPERT_UP], x, 0, scratch + wide, first, end)
        at = 4 * first
        blocks.activate(layer[ACTIVATION], True, scratch + at, scratch + wide + at, end - first, out + at)
        out += wide


@jit
def add(layer, scores, ids, gates, scratch, y, first, end):
    """y[first:end] += the experts' outputs, weighed; y (M,) at an address."""
    linears, wide = table(layer), 4 * ((layer[D_EXPERT] + 63) // 64 * 64)
    at = scores + 4 * ((layer[N_EXPERTS] + 63) // 64 * 64)
    g, visited = floats(gates, layer[N_ACTIVE]), carray(array_at(ids), (layer[N_ACTIVE],), np.int64)
    total, one = floats(y, end), floats(scratch, end)
    for j in range(layer[N_ACTIVE]):
        product(linears[FIRST_EXPERT + 3 * visited[j] + EXPERT_DOWN], at, 0, scratch, first, end)
        for i in range(first, end):
            total[i] += g[j] * one[i]
        at += wide
