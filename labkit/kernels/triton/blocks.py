# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# ruff: noqa: SIM109 - Triton's compiler takes no "in"
"""ggml's blocks as they lie in a GGUF file, read on a GPU: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K.

    dot_blocks    a few rows with one token, for the kernels of ``product``
    row_halves    the weights themselves, some of a row at a time

A row is a chain of pieces: 16 bytes of codes, whose low nibbles are the weights of 16 inputs from ``first_input`` on,
and whose high nibbles are those of 16 inputs ``gap`` further (in Q8_0 they are 16 more bytes). Within either half all
weights have one scale and one minimum, in every format, so one walk serves all of them: w = s q + m. The bytes of a
block stand in ``labkit.quant.blocks`` and ``k_quants``. Codes are read as bytes, scales as float16 of the same memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from labkit.kernels.triton.chain import await_previous
from labkit.kernels.triton.dot import gained

PIECE = tl.constexpr(32)
"""Weights of a piece: 16 low ones and 16 high ones."""
FIRST_KIND = tl.constexpr(100)
"""A block format's number among the kinds of a matrix: ggml's own, and this."""
Q4_0, Q4_1, Q5_0 = tl.constexpr(102), tl.constexpr(103), tl.constexpr(106)
Q5_1, Q8_0 = tl.constexpr(107), tl.constexpr(108)
Q4_K, Q5_K, Q6_K = tl.constexpr(112), tl.constexpr(113), tl.constexpr(114)


@triton.jit
def first_input(piece, KIND: tl.constexpr):
    """The input that a piece's first low nibble belongs to."""
    if KIND == Q6_K:
        first = (piece // 4) * 128 + (piece % 4) * 16
    elif KIND == Q4_K or KIND == Q5_K:
        first = (piece // 2) * 64 + (piece % 2) * 16
    else:
        first = piece * 32
    return first


@triton.jit
def gap(KIND: tl.constexpr):
    """How many inputs further the weight in a byte's high nibble belongs."""
    return 64 if KIND == Q6_K else 32 if KIND >= Q4_K else 16


@triton.jit
def _six_bits(w, at, sub, there):
    """Scale and minimum of sub-block ``sub`` of a Q4_K or Q5_K block, 6 bits each of the 12 bytes from ``at`` on."""
    a = tl.load(w + at + sub % 4, mask=there, other=0).to(tl.int32)
    b = tl.load(w + at + 4 + sub % 4, mask=there, other=0).to(tl.int32)
    c = tl.load(w + at + 8 + sub % 4, mask=there, other=0).to(tl.int32)
    scale = tl.where(sub < 4, a & 63, (c & 15) | ((a >> 6) << 4))
    minimum = tl.where(sub < 4, b & 63, (c >> 4) | ((b >> 6) << 4))
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def _small_blocks(w, s, row, piece, lane, n_in, there, KIND: tl.constexpr):
    """Blocks of 32 weights, a piece each: codes int32, scale and minimum."""
    HEAD: tl.constexpr = 4 if KIND == Q4_1 or KIND == Q5_1 else 2
    FIFTH: tl.constexpr = 4 if KIND == Q5_0 or KIND == Q5_1 else 0
    SIZE: tl.constexpr = HEAD + FIFTH + (32 if KIND == Q8_0 else 16)
    at = (row * (n_in // 32) + piece) * SIZE
    scale = tl.load(s + at // 2, mask=there, other=0.0).to(tl.float32)
    minimum = 0.0 * scale
    codes = tl.load(w + at + HEAD + FIFTH + lane, mask=there, other=0).to(tl.int32)
    if KIND == Q8_0:
        low = (codes ^ 128) - 128
        high = (tl.load(w + at + HEAD + 16 + lane, mask=there, other=0).to(tl.int32) ^ 128) - 128
    else:
        low, high = codes & 15, codes >> 4
        if FIFTH:
            fifth = tl.load(w + at + HEAD + lane // 8, mask=there, other=0).to(tl.int32) >> (lane % 8)
            low |= (fifth & 1) << 4
            fifth = tl.load(w + at + HEAD + 2 + lane // 8, mask=there, other=0).to(tl.int32) >> (lane % 8)
            high |= (fifth & 1) << 4
        if HEAD == 4:
            minimum = tl.load(s + at // 2 + 1, mask=there, other=0.0).to(tl.float32)
        else:
            low -= 16 if FIFTH else 8
            high -= 16 if FIFTH else 8
    return low, high, scale, scale, minimum, minimum


@triton.jit
def _large_blocks(w, s, row, piece, lane, n_in, there, KIND: tl.constexpr):
    """Blocks of 256 weights, eight pieces each: codes int32, scales and minima of the low and the high half."""
    SIZE: tl.constexpr = 210 if KIND == Q6_K else 176 if KIND == Q5_K else 144
    at = (row * (n_in // 256) + piece // 8) * SIZE
    p = piece % 8
    if KIND == Q6_K:
        codes = tl.load(w + at + 16 * p + lane, mask=there, other=0).to(tl.int32)
        two_bits = tl.load(w + at + 128 + 32 * (p // 4) + 16 * (p % 2) + lane, mask=there, other=0).to(tl.int32)
        move = 2 * (p % 4 // 2)
        low = ((codes & 15) | (((two_bits >> move) & 3) << 4)) - 32
        high = ((codes >> 4) | (((two_bits >> (move + 4)) & 3) << 4)) - 32
        scale = tl.load(s + (at + 208) // 2, mask=there, other=0.0).to(tl.float32)
        sub = at + 192 + 8 * (p // 4) + p % 4
        s_low = scale * ((tl.load(w + sub, mask=there, other=0).to(tl.int32) ^ 128) - 128).to(tl.float32)
        s_high = scale * ((tl.load(w + sub + 4, mask=there, other=0).to(tl.int32) ^ 128) - 128).to(tl.float32)
        m_low, m_high = 0.0 * scale, 0.0 * scale
    else:
        CODES: tl.constexpr = 48 if KIND == Q5_K else 16
        codes = tl.load(w + at + CODES + 16 * p + lane, mask=there, other=0).to(tl.int32)
        low, high = codes & 15, codes >> 4
        sub = p // 2 * 2
        if KIND == Q5_K:
            fifth = tl.load(w + at + 16 + 16 * (p % 2) + lane, mask=there, other=0).to(tl.int32) >> sub
            low |= (fifth & 1) << 4
            high |= ((fifth >> 1) & 1) << 4
        scale = tl.load(s + at // 2, mask=there, other=0.0).to(tl.float32)
        minimum = -tl.load(s + at // 2 + 1, mask=there, other=0.0).to(tl.float32)
        s_low, m_low = _six_bits(w, at + 4, sub, there)
        s_high, m_high = _six_bits(w, at + 4, sub + 1, there)
        s_low, s_high, m_low, m_high = scale * s_low, scale * s_high, minimum * m_low, minimum * m_high
    return low, high, s_low, s_high, m_low, m_high


@triton.jit
def row_halves(w, s, row, piece, lane, n_in, there, KIND: tl.constexpr):
    """Codes of pieces as float32, low and high; their scales, low and high; their minima, low and high.

    row int64 (R, 1, 1), piece (1, P, 1), lane (1, 1, 16), there (1, P, 1): codes (R, P, 16), the others (R, P, 1). A
    piece that is not there has a scale and a minimum of 0."""
    if KIND >= Q4_K:
        low, high, s_low, s_high, m_low, m_high = _large_blocks(w, s, row, piece, lane, n_in, there, KIND)
    else:
        low, high, s_low, s_high, m_low, m_high = _small_blocks(w, s, row, piece, lane, n_in, there, KIND)
    return low.to(tl.float32), high.to(tl.float32), s_low, s_high, m_low, m_high


@triton.jit
def dot_blocks(
    x, gain, w, s, rows, n_in, eps,
    KIND: tl.constexpr, COLS: tl.constexpr, NORMED: tl.constexpr, UNIT_OFFSET: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Rows ``rows`` int64 (R,), all of which exist, with x, normed if wanted: float32 (R,)."""
    MINIMUM: tl.constexpr = KIND == Q4_1 or KIND == Q5_1 or KIND == Q4_K or KIND == Q5_K
    pieces = tl.arange(0, COLS // PIECE)[None, :, None]
    lane = tl.arange(0, 16)[None, None, :]
    row = rows[:, None, None]
    total = tl.zeros((rows.shape[0], COLS // PIECE, 1), tl.float32)
    squares = tl.zeros((1, COLS // PIECE, 1), tl.float32)
    await_previous(CHAINED)
    for first in range(0, n_in, COLS):
        piece = first // PIECE + pieces
        there = piece * PIECE < n_in
        low, high, s_low, s_high, m_low, m_high = row_halves(w, s, row, piece, lane, n_in, there, KIND)
        at = first_input(piece, KIND) + lane
        plain_low, x_low = gained(x, gain, at, there, NORMED, UNIT_OFFSET)
        plain_high, x_high = gained(x, gain, at + gap(KIND), there, NORMED, UNIT_OFFSET)
        if NORMED:
            squares += tl.sum(plain_low * plain_low + plain_high * plain_high, axis=2, keep_dims=True)
        total += s_low * tl.sum(low * x_low, axis=2, keep_dims=True)
        total += s_high * tl.sum(high * x_high, axis=2, keep_dims=True)
        if MINIMUM:
            total += m_low * tl.sum(x_low, axis=2, keep_dims=True)
            total += m_high * tl.sum(x_high, axis=2, keep_dims=True)
    y = tl.sum(tl.sum(total, axis=2), axis=1)
    if NORMED:
        y *= 1.0 / tl.sqrt(tl.sum(squares) / n_in + eps)
    return y
