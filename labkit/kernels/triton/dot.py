# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# ruff: noqa: SIM102, SIM108 - compile-time choices, which Triton takes one at a time
"""Dot products of one token with rows of weights, for the kernels of ``product``: plain, int8 and int4.

The int4 layout is ``labkit.quant.grid``'s: four rows a panel, 64 weights a block of 16 words whose nibble j of word i
is weight 16 j + i. A nibble becomes a float without a conversion: or-ed where it stands into the mantissa of 2^23, it
reads 2^23 + 16^j q, and 2^23 + 16^j z is taken off; a byte likewise. On a GPU with much bandwidth packed weights are
bound by such instructions, not by their bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from labkit.kernels.triton.chain import await_previous

TWO_23 = 0x4B000000
"""The bits of the float 2^23. An argument, not a constant: in a register it makes mask and "or" one instruction."""


@triton.jit
def gained(x, gain, at, there, NORMED: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    """x and x times the norm's weight at ``at``: both are wanted, the first for the mean square."""
    v = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    if NORMED:
        g = tl.load(gain + at, mask=there, other=0.0).to(tl.float32)
        if UNIT_OFFSET:
            g += 1.0
        return v, v * g
    else:
        return v, v


@triton.jit
def side_by_side(y0, y1, y2, y3, r):
    """Four numbers as a vector, r (N,) saying which stands where."""
    return tl.where(r < 2, tl.where(r == 0, y0, y1), tl.where(r == 2, y2, y3))


@triton.jit
def _dot_row(held, v, two_23, BYTES: tl.constexpr):
    """One row's weights (COLS / VEC, VEC) with x of that shape: (COLS / VEC,)."""
    if BYTES:
        w = ((held.to(tl.int32) & 0xFF) ^ (two_23 + 128)).to(tl.float32, bitcast=True) - 8388736.0
    else:
        w = held.to(tl.float32)
    return tl.sum(w * v, axis=1)


@triton.jit
def _rows(w0, w1, w2, w3, cols, inside, N: tl.constexpr):
    """The weights of N of four rows, asked for together."""
    a = tl.load(w0 + cols, mask=inside, other=0)
    b, c, d = a, a, a
    if N > 1:
        b = tl.load(w1 + cols, mask=inside, other=0)
    if N > 2:
        c = tl.load(w2 + cols, mask=inside, other=0)
        d = tl.load(w3 + cols, mask=inside, other=0)
    return a, b, c, d


@triton.jit
def dot_rows(
    x, gain, w0, w1, w2, w3, n_in, eps, two_23,
    N: tl.constexpr, COLS: tl.constexpr, VEC: tl.constexpr, BYTES: tl.constexpr, NORMED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """N of four rows of numbers, or of int8 with BYTES, that start at w0 ... w3, with x: four float32 sums.

    The first turn's weights are asked for before x is there, the others one turn ahead."""
    none = tl.zeros((COLS // VEC,), tl.float32)
    t0, t1, t2, t3, squares = none, none, none, none, none
    at = tl.arange(0, COLS // VEC)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    a, b, c, d = _rows(w0, w1, w2, w3, at, at < n_in, N)
    await_previous(CHAINED)
    for first in range(0, n_in, COLS):
        cols = first + at
        if not BYTES:
            next_a, next_b, next_c, next_d = _rows(w0, w1, w2, w3, cols + COLS, cols + COLS < n_in, N)
        plain, v = gained(x, gain, cols, cols < n_in, NORMED, UNIT_OFFSET)
        if NORMED:
            squares += tl.sum(plain * plain, axis=1)
        t0 += _dot_row(a, v, two_23, BYTES)
        if N > 1:
            t1 += _dot_row(b, v, two_23, BYTES)
        if N > 2:
            t2 += _dot_row(c, v, two_23, BYTES)
            t3 += _dot_row(d, v, two_23, BYTES)
        if BYTES:  # unpacking fills the registers: no room for two turns
            a, b, c, d = _rows(w0, w1, w2, w3, cols + COLS, cols + COLS < n_in, N)
        else:
            a, b, c, d = next_a, next_b, next_c, next_d
    y0, y1, y2, y3, shrink = tl.sum(t0), 0.0, 0.0, 0.0, 1.0
    if N > 1:
        y1 = tl.sum(t1)
    if N > 2:
        y2, y3 = tl.sum(t2), tl.sum(t3)
    if NORMED:
        shrink = 1.0 / tl.sqrt(tl.sum(squares) / n_in + eps)
    return y0 * shrink, y1 * shrink, y2 * shrink, y3 * shrink


@triton.jit
def half_of(packed, r):
    """The r-th of the four float16 in an int64, as float32."""
    return ((packed >> (16 * r)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def weights_at(
    w, s, z, rows, cols, there, stride, n_groups, KIND: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr
):
    """Single weights as float32, whatever form they are stored in: rows int64, all of which exist."""
    if KIND == 4:
        word = (rows // 4) * stride + (cols // 64) * 64 + (rows % 4) * 16 + cols % 16
        q = (tl.load(w + word, mask=there, other=0).to(tl.int32) >> (4 * ((cols % 64) // 16))) & 15
        cell = (rows // 4) * n_groups + cols // GROUP
        zero = 8.0
        if HAS_ZEROS:
            zero = ((tl.load(z + cell, mask=there, other=0) >> (8 * (rows % 4))) & 0xFF).to(tl.float32)
        y = (q.to(tl.float32) - zero) * half_of(tl.load(s + cell, mask=there, other=0), rows % 4)
    else:
        y = tl.load(w + rows * stride + cols, mask=there, other=0).to(tl.float32)
        if KIND == 8:
            y *= tl.load(s + rows)
    return y


@triton.jit
def _dot_words(
    words, s, z, s_late, z_late, v0, v1, v2, v3, two_23, R: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr
):
    """Row R of a panel: words (B, I, VEC) int16, whose four nibbles meet v0 ... v3 of that shape. (B, I) float32.

    s, z (B, I) hold the scales and zero points of all four rows; _late those of the block's second half, where that is
    a group of its own."""
    words = words.to(tl.int32)
    low = 8.0
    if HAS_ZEROS:
        low = ((z >> (8 * R)) & 0xFF).to(tl.float32)[:, :, None]
    q0 = ((words & 0x000F) | two_23).to(tl.float32, bitcast=True) - (low + 8388608.0)
    q1 = ((words & 0x00F0) | two_23).to(tl.float32, bitcast=True) - (low * 16.0 + 8388608.0)
    half = tl.sum(q0 * v0, axis=2) + tl.sum(q1 * v1, axis=2) * (1.0 / 16)
    scale = half_of(s, R)
    if HAS_ZEROS:
        if GROUP == 32:
            low = ((z_late >> (8 * R)) & 0xFF).to(tl.float32)[:, :, None]
    q2 = ((words & 0x0F00) | two_23).to(tl.float32, bitcast=True) - (low * 256.0 + 8388608.0)
    q3 = ((words & 0xF000) | two_23).to(tl.float32, bitcast=True) - (low * 4096.0 + 8388608.0)
    late = tl.sum(q2 * v2, axis=2) * (1.0 / 256) + tl.sum(q3 * v3, axis=2) * (1.0 / 4096)
    if GROUP == 32:
        total = half * scale + late * half_of(s_late, R)
    else:
        total = (half + late) * scale
    return total


@triton.jit
def _panel(w, s, z, block, i, n_in, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """The words of a panel's four rows in ``block`` (B, I), and their scales and zero points: asked for together."""
    inside = block * 64 < n_in
    there, cols, group = inside[:, :, None], (block * 64)[:, :, None] + i, (block * 64) // GROUP
    w0 = tl.load(w + cols, mask=there, other=0)
    w1 = tl.load(w + cols + 16, mask=there, other=0)
    w2 = tl.load(w + cols + 32, mask=there, other=0)
    w3 = tl.load(w + cols + 48, mask=there, other=0)
    scale = tl.load(s + group, mask=inside, other=0)
    zero, late, zero_late = scale, scale, scale
    if HAS_ZEROS:
        zero = tl.load(z + group, mask=inside, other=0)
        zero_late = zero
    if GROUP == 32:  # a block holds two groups
        late = tl.load(s + group + 1, mask=inside, other=0)
        if HAS_ZEROS:
            zero_late = tl.load(z + group + 1, mask=inside, other=0)
    return w0, w1, w2, w3, scale, zero, late, zero_late


@triton.jit
def dot_panels(
    x, gain, w, s, z, w_other, s_other, z_other, n_in, eps, two_23,
    N: tl.constexpr, COLS: tl.constexpr, VEC: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    NORMED: tl.constexpr, UNIT_OFFSET: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One panel or, with N = 2, two, with x: a thread reads its part of x once for all their rows.

    w points at the first panel's words, s and z at its scales and zero points, four rows' in one number each. Two
    vectors (4,) float32. The first turn's weights are asked for before x is there."""
    at_block = tl.arange(0, COLS // 64)[:, None] + 0 * tl.arange(0, 16 // VEC)[None, :]
    i = tl.arange(0, 16 // VEC)[None, :, None] * VEC + tl.arange(0, VEC)[None, None, :]
    none = tl.zeros((COLS // 64, 16 // VEC), tl.float32)
    t0, t1, t2, t3, u0, u1, u2, u3, squares = none, none, none, none, none, none, none, none, none
    w0, w1, w2, w3, a, b, c, d = _panel(w, s, z, at_block, i, n_in, GROUP, HAS_ZEROS)
    if N == 2:
        o0, o1, o2, o3, e, f, g, h = _panel(w_other, s_other, z_other, at_block, i, n_in, GROUP, HAS_ZEROS)
    await_previous(CHAINED)
    for first in range(0, n_in, COLS):
        block = first // 64 + at_block
        ahead = block + COLS // 64
        if N == 1:
            n0, n1, n2, n3, na, nb, nc, nd = _panel(w, s, z, ahead, i, n_in, GROUP, HAS_ZEROS)
        cols = (block * 64)[:, :, None] + i
        s0, v0 = gained(x, gain, cols, cols < n_in, NORMED, UNIT_OFFSET)
        s1, v1 = gained(x, gain, cols + 16, cols + 16 < n_in, NORMED, UNIT_OFFSET)
        s2, v2 = gained(x, gain, cols + 32, cols + 32 < n_in, NORMED, UNIT_OFFSET)
        s3, v3 = gained(x, gain, cols + 48, cols + 48 < n_in, NORMED, UNIT_OFFSET)
        if NORMED:
            squares += tl.sum(s0 * s0 + s1 * s1 + s2 * s2 + s3 * s3, axis=2)
        t0 += _dot_words(w0, a, b, c, d, v0, v1, v2, v3, two_23, 0, GROUP, HAS_ZEROS)
        t1 += _dot_words(w1, a, b, c, d, v0, v1, v2, v3, two_23, 1, GROUP, HAS_ZEROS)
        t2 += _dot_words(w2, a, b, c, d, v0, v1, v2, v3, two_23, 2, GROUP, HAS_ZEROS)
        t3 += _dot_words(w3, a, b, c, d, v0, v1, v2, v3, two_23, 3, GROUP, HAS_ZEROS)
        if N == 1:
            w0, w1, w2, w3, a, b, c, d = n0, n1, n2, n3, na, nb, nc, nd
        else:  # two panels fill the registers: no room for two turns
            u0 += _dot_words(o0, e, f, g, h, v0, v1, v2, v3, two_23, 0, GROUP, HAS_ZEROS)
            u1 += _dot_words(o1, e, f, g, h, v0, v1, v2, v3, two_23, 1, GROUP, HAS_ZEROS)
            u2 += _dot_words(o2, e, f, g, h, v0, v1, v2, v3, two_23, 2, GROUP, HAS_ZEROS)
            u3 += _dot_words(o3, e, f, g, h, v0, v1, v2, v3, two_23, 3, GROUP, HAS_ZEROS)
            w0, w1, w2, w3, a, b, c, d = _panel(w, s, z, ahead, i, n_in, GROUP, HAS_ZEROS)
            o0, o1, o2, o3, e, f, g, h = _panel(w_other, s_other, z_other, ahead, i, n_in, GROUP, HAS_ZEROS)
    r = tl.arange(0, 4)
    shrink = 1.0
    if NORMED:
        shrink = 1.0 / tl.sqrt(tl.sum(squares) / n_in + eps)
    y = side_by_side(tl.sum(t0), tl.sum(t1), tl.sum(t2), tl.sum(t3), r) * shrink
    other = y
    if N == 2:
        other = side_by_side(tl.sum(u0), tl.sum(u1), tl.sum(u2), tl.sum(u3), r) * shrink
    return y, other
