# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""The parts of a compiled step between the products: norms, rotary, attention of one query, activations.

Every thread of the team runs these for itself where that is cheaper than waiting for another (a norm of 576 numbers
takes less time than two barriers). Arrays are float32 unless said otherwise.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray

from labkit.kernels.cpu import rowwise
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.plan import (
    COS,
    INTERLEAVED,
    N_TURNED,
    SIN,
)
from labkit.kernels.cpu.rowwise import array_at


@jit
def floats(address, n):
    """n float32 at an address."""
    return carray(array_at(address), (n,), np.float32)


@jit
def copy(source, n, to):
    """n float32 from one address to another."""
    x, y = floats(source, n), floats(to, n)
    for i in range(n):
        y[i] = x[i]


@jit
def fill(address, first, end, value):
    """Numbers [first, end) of an address, all the same."""
    y = floats(address, end)
    for i in range(first, end):
        y[i] = value


@jit
def norm(x, n, weight, bias, eps, layer_norm, out):
    """RMSNorm or LayerNorm of n numbers at address x, to address out. ``bias`` 0: none."""
    xs, ys, w = floats(x, n), floats(out, n), floats(weight, n)
    mean = np.float32(0.0)
    if layer_norm:
        total = 0.0
        for i in range(n):
            total += xs[i]
        mean = np.float32(total / n)
        squares = 0.0
        for i in range(n):
            squares += (xs[i] - mean) * (xs[i] - mean)
    else:
        squares = float(rowwise.square_sum(x, n))
    turn = np.float32(1.0 / math.sqrt(squares / n + eps))
    if bias != 0:
        b = floats(bias, n)
        for i in range(n):
            ys[i] = (xs[i] - mean) * turn * w[i] + b[i]
    else:
        for i in range(n):
            ys[i] = (xs[i] - mean) * turn * w[i]


@jit
def turn(heads, n_heads, d_head, layer, position):
    """Rotary embedding in place: each pair of each head turned by its angle at ``position``."""
    n = layer[N_TURNED]
    if n == 0:
        return
    cos, sin = floats(layer[COS] + 4 * n * position, n), floats(layer[SIN] + 4 * n * position, n)
    for head in range(n_heads):
        at = heads + 4 * d_head * head
        if layer[INTERLEAVED] != 0:
            x = floats(at, 2 * n)
            for i in range(n):
                a, b = x[2 * i], x[2 * i + 1]
                x[2 * i], x[2 * i + 1] = a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]
        else:
            first, second = floats(at, n), floats(at + 4 * n, n)
            for i in range(n):
                a, b = first[i], second[i]
                first[i], second[i] = a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]


@jit
def activate(kind, gated, g, u, n, out):
    """act(g) * u, or act(u) when not gated: n numbers at addresses. kind as in ``plan.ACTIVATIONS``."""
    if kind == 0 and gated and n % 8 == 0:
        rowwise.gate(g, u, n, out)
        return
    xs, us, ys = floats(g if gated else u, n), floats(u, n), floats(out, n)
    for i in range(n):
        x = xs[i]
        if kind == 0:
            y = x / (np.float32(1.0) + np.float32(math.exp(-x)))
        elif kind == 1:
            y = np.float32(0.5) * x * (np.float32(1.0) + np.float32(math.erf(x * np.float32(0.7071067811865476))))
        elif kind == 2:
            inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
            y = np.float32(0.5) * x * (np.float32(1.0) + np.float32(math.tanh(inner)))
        else:
            y = max(x, np.float32(0.0))
        ys[i] = y * us[i] if gated else y
