# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Dot products of one token with rows of weights, for the kernels of ``product``: plain, int8 and int4.

The int4 layout is ``labkit.quant.grid``'s: four rows a panel, 64 weights a block of 16 words whose nibble j of word i is
weight 16 j + i. A nibble becomes a float without a conversion: or-ed where it stands into the mantissa of 2^23, it
reads 2^23 + 16^j q, and 2^23 + 16^j z is taken off. On a GPU with much bandwidth int4 is bound by its instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

TWO_23 = 0x4B000000
"""The bits of the float 2^23. An argument, not a constant: mask and "or" are one instruction only with it in a register."""


@triton.jit
def _gained(x, gain, at, there, NORMED: tl.constexpr, UNIT_OFFSET: tl.constexpr):
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
def dot_rows(
    x, gain, row_w, row_s, there, n_in, eps,
    ROWS: tl.constexpr, COLS: tl.constexpr, VEC: tl.constexpr, SCALED: tl.constexpr, NORMED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    """Rows of numbers or of int8 with x: row_w (ROWS,) points at each row's first weight. (ROWS,) float32."""
    total = tl.zeros((ROWS, COLS // VEC), tl.float32)
    squares = tl.zeros((1, COLS // VEC), tl.float32)
    for first in range(0, n_in, COLS):
        cols = first + tl.arange(0, COLS // VEC)[None, :, None] * VEC + tl.arange(0, VEC)[None, None, :]
        inside = cols < n_in
        ws = tl.load(row_w[:, None, None] + cols, mask=there[:, None, None] & inside, other=0)
        v, turned = _gained(x, gain, cols, inside, NORMED, UNIT_OFFSET)
        if NORMED:
            squares += tl.sum(v * v, axis=2)
        total += tl.sum(ws.to(tl.float32) * turned, axis=2)
    y = tl.sum(total, axis=1)
    if SCALED:
        y *= tl.load(row_s, mask=there, other=0.0)
    if NORMED:
        y *= 1.0 / tl.sqrt(tl.sum(squares) / n_in + eps)
    return y


@triton.jit
def _dot_words(
    row_w, row_s, row_z, v0, v1, v2, v3, group, inside, two_23, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr
):
    """One row's blocks with x: row_w (B, I, VEC) points at words, v0 ... v3 of that shape meet their nibbles. (B, I)."""
    words = tl.load(row_w, mask=inside[:, :, None], other=0).to(tl.int32)
    scale = tl.load(row_s + group, mask=inside, other=0.0).to(tl.float32)
    low = tl.full(group.shape, 8.0, tl.float32)[:, :, None]
    if HAS_ZEROS:
        low = tl.load(row_z + group, mask=inside, other=0).to(tl.float32)[:, :, None]
    q0 = ((words & 0x000F) | two_23).to(tl.float32, bitcast=True) - (low + 8388608.0)
    q1 = ((words & 0x00F0) | two_23).to(tl.float32, bitcast=True) - (low * 16.0 + 8388608.0)
    half = tl.sum(q0 * v0, axis=2) + tl.sum(q1 * v1, axis=2) * (1.0 / 16)
    whole = tl.zeros(group.shape, tl.float32)
    if GROUP == 32:  # the block's second half has a scale of its own
        whole, half = half * scale, whole
        scale = tl.load(row_s + group + 4, mask=inside, other=0.0).to(tl.float32)
        if HAS_ZEROS:
            low = tl.load(row_z + group + 4, mask=inside, other=0).to(tl.float32)[:, :, None]
    q2 = ((words & 0x0F00) | two_23).to(tl.float32, bitcast=True) - (low * 256.0 + 8388608.0)
    q3 = ((words & 0xF000) | two_23).to(tl.float32, bitcast=True) - (low * 4096.0 + 8388608.0)
    half += tl.sum(q2 * v2, axis=2) * (1.0 / 256) + tl.sum(q3 * v3, axis=2) * (1.0 / 4096)
    return whole + half * scale


@triton.jit
def _dot_panel(
    at, s, z, v0, v1, v2, v3, group, inside, two_23, t0, t1, t2, t3, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr
):
    """The sums of a panel's four rows, moved on."""
    t0 += _dot_words(at, s, z, v0, v1, v2, v3, group, inside, two_23, GROUP, HAS_ZEROS)
    t1 += _dot_words(at + 16, s + 1, z + 1, v0, v1, v2, v3, group, inside, two_23, GROUP, HAS_ZEROS)
    t2 += _dot_words(at + 32, s + 2, z + 2, v0, v1, v2, v3, group, inside, two_23, GROUP, HAS_ZEROS)
    t3 += _dot_words(at + 48, s + 3, z + 3, v0, v1, v2, v3, group, inside, two_23, GROUP, HAS_ZEROS)
    return t0, t1, t2, t3


@triton.jit
def _side_by_side(t0, t1, t2, t3, r):
    """Four sums as a vector (4,)."""
    return tl.where(r < 2, tl.where(r == 0, tl.sum(t0), tl.sum(t1)), tl.where(r == 2, tl.sum(t2), tl.sum(t3)))


@triton.jit
def dot_int4(
    x, gain, w, s, z, panel, n_panels, n_in, stride, n_groups, eps, two_23,
    PANELS: tl.constexpr, COLS: tl.constexpr, VEC: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    NORMED: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    """One or two panels with x: a thread reads its part of x once for all their rows. (4 PANELS,) float32."""
    BLOCKS: tl.constexpr = COLS // 64
    at_block = tl.arange(0, BLOCKS)[:, None] + 0 * tl.arange(0, 16 // VEC)[None, :]
    i = tl.arange(0, 16 // VEC)[None, :, None] * VEC + tl.arange(0, VEC)[None, None, :]
    zero = tl.zeros((BLOCKS, 16 // VEC), tl.float32)
    t0, t1, t2, t3, u0, u1, u2, u3, squares = zero, zero, zero, zero, zero, zero, zero, zero, zero
    cell = panel.to(tl.int64) * n_groups * 4
    w, s, z = w + panel.to(tl.int64) * stride, s + cell, z + cell
    for first in range(0, n_in, COLS):
        block = first // 64 + at_block
        inside = block * 64 < n_in
        cols = (block * 64)[:, :, None] + i
        s0, v0 = _gained(x, gain, cols, cols < n_in, NORMED, UNIT_OFFSET)
        s1, v1 = _gained(x, gain, cols + 16, cols + 16 < n_in, NORMED, UNIT_OFFSET)
        s2, v2 = _gained(x, gain, cols + 32, cols + 32 < n_in, NORMED, UNIT_OFFSET)
        s3, v3 = _gained(x, gain, cols + 48, cols + 48 < n_in, NORMED, UNIT_OFFSET)
        if NORMED:
            squares += tl.sum(s0 * s0 + s1 * s1 + s2 * s2 + s3 * s3, axis=2)
        group = ((block * 64) // GROUP) * 4
        t0, t1, t2, t3 = _dot_panel(
            w + cols, s, z, v0, v1, v2, v3, group, inside, two_23, t0, t1, t2, t3, GROUP, HAS_ZEROS
        )
        if PANELS == 2:
            here = inside & (panel + 1 < n_panels)
            u0, u1, u2, u3 = _dot_panel(
                w + stride + cols, s + n_groups * 4, z + n_groups * 4, v0, v1, v2, v3, group, here, two_23,
                u0, u1, u2, u3, GROUP, HAS_ZEROS,
            )  # fmt: skip
    r = tl.arange(0, 4 * PANELS)
    y = _side_by_side(t0, t1, t2, t3, r)
    if PANELS == 2:
        y = tl.where(r < 4, y, _side_by_side(u0, u1, u2, u3, r - 4))
    if NORMED:
        y *= 1.0 / tl.sqrt(tl.sum(squares) / n_in + eps)
    return y
