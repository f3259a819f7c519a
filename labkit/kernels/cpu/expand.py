# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""What is made of a packed panel before tokens pass it: 16-bit words, and float32 scales and minima.

expand(bits, codes, n_units, out)          units of 8 inputs of 16 rows to 256 bytes each (``integer_tiles.words``)
spread(linear, panel, at, n, scales, minima)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from labkit.kernels.cpu import blocks, simd
from labkit.kernels.cpu.integer_tiles import LINE, TIER, nibbles, signed_bytes
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.plan import GROUP, MINIMA, MINIMUM_BYTES, N_IN, SCALE_BYTES, SCALES, ZERO
from labkit.kernels.cpu.simd import I8, I64, LANES, V16I16, VF32, VI8, VI16, VI32, const, load
from labkit.kernels.panel_layout import BLOCK, PLANES, ROWS

HALVES = (0, 1)
FLOAT, HALF, POINT = 4, 2, 1
"""How scales and minima are stored: bytes of each; a zero point is one byte."""


def _spread_bits(b: Any, at: Any, half: int, width: int, shift: int) -> list[Any]:
    """A plane of 1 or 2 bits of eight rows as four vectors of pairs, its bits moved to ``shift``."""
    packed = load(b, b.add(at, const(8 * width * half)), VI8 if width == 1 else VI16)
    wide = b.zext(packed, VI32)
    pairs = b.bitcast(b.or_(wide, b.shl(wide, ir.Constant(VI32, [16 - 4 * width] * 8))), V16I16)
    found = []
    for j in range(4):
        left = shift - width * j
        moved = pairs
        if left:
            amount = ir.Constant(V16I16, [abs(left)] * 16)
            moved = b.shl(pairs, amount) if left > 0 else b.lshr(pairs, amount)
        found.append(b.and_(moved, ir.Constant(V16I16, [(2**width - 1) << shift] * 16)))
    return found


def make_expand(bits: int) -> Any:
    """Units of ``bits`` bits; asks for the line 4 KB ahead of each that it reads."""

    @intrinsic
    def expand(typingctx: Any, codes: Any, n_units: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            codes, n_units, out = args
            with cgutils.for_range(b, n_units, intp=I64) as loop:
                at = b.add(codes, b.mul(loop.index, const(2 * bits * 8)))
                to = b.add(out, b.mul(loop.index, const(4 * LINE)))
                for half in HALVES:
                    vectors: list[Any] = [None] * 4
                    plane_at, shift = 0, 0
                    for width in PLANES[bits]:
                        place = b.add(at, const(plane_at))
                        if width == 8:
                            plane = [part() for part in signed_bytes(b, b.add(place, const(32 * half)), LANES)]
                        elif width == 4:
                            plane = [part() for part in nibbles(b, b.add(place, const(32 * half)), LANES)]
                        else:
                            plane = _spread_bits(b, place, half, width, shift)
                        vectors = [p if v is None else b.or_(v, p) for v, p in zip(vectors, plane, strict=True)]
                        plane_at, shift = plane_at + 16 * width, shift + width
                    for j, vector in enumerate(vectors):
                        simd.store(b, vector, b.add(to, const(LINE * j + 32 * half)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    return expand


expand_8, expand_6, expand_5, expand_4, expand_3, expand_2 = (make_expand(bits) for bits in PLANES)


@jit
def expand(bits, codes, n_units, out):
    if bits == 8:
        expand_8(codes, n_units, out)
    elif bits == 4:
        expand_4(codes, n_units, out)
    elif bits == 6:
        expand_6(codes, n_units, out)
    elif bits == 5:
        expand_5(codes, n_units, out)
    elif bits == 3:
        expand_3(codes, n_units, out)
    elif bits == 2:
        expand_2(codes, n_units, out)


@intrinsic
def halves_to_floats(typingctx: Any, halves: Any, n: Any, out: Any) -> Any:
    """n finite float16 to float32, exact, subnormals too; n a multiple of 8. Asks for the n behind them."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        halves, n, out = args
        with cgutils.for_range_slice(b, const(0), n, const(8), I64) as (at, _):
            place = b.add(halves, b.mul(at, const(2)))
            simd.prefetch(b, b.add(place, b.mul(n, const(2))))
            simd.store(b, _widened(b, place), b.add(out, b.mul(at, const(4))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


def _widened(b: Any, place: Any) -> Any:
    """8 float16 as float32: by the tier's instruction, or by their bits."""
    if TIER.has_halves:
        return b.fpext(load(b, place, ir.VectorType(ir.HalfType(), LANES)), VF32)
    bits = b.zext(load(b, place, VI16), VI32)
    sign = b.shl(b.and_(bits, simd.isplat(0x8000)), simd.isplat(16))
    size = b.shl(b.and_(bits, simd.isplat(0x7FFF)), simd.isplat(13))
    size = b.bitcast(b.fmul(b.bitcast(size, VF32), simd.fsplat(2.0**112)), VI32)
    return b.bitcast(b.or_(size, sign), VF32)


@intrinsic
def offsets(typingctx: Any, scales: Any, points: Any, point: Any, n: Any, out: Any) -> Any:
    """-z s in float32, z uint8 at ``points`` (0: all are ``point``); n a multiple of 8. Asks for the n behind them."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        scales, points, point, n, out = args
        same = b.sitofp(simd.splat(b, b.trunc(point, simd.I32)), VF32)
        stored = b.icmp_unsigned("!=", points, const(0))
        with cgutils.for_range_slice(b, const(0), n, const(8), I64) as (at, _):
            z = cgutils.alloca_once_value(b, same)
            with b.if_then(stored):
                place = b.add(points, at)
                simd.prefetch(b, b.add(place, n))
                b.store(b.uitofp(load(b, place, ir.VectorType(I8, 8)), VF32), z)
            s = load(b, b.add(scales, b.mul(at, const(4))), VF32)
            simd.store(b, b.fneg(b.fmul(s, b.load(z))), b.add(out, b.mul(at, const(4))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def copy_floats(typingctx: Any, x: Any, n: Any, out: Any) -> Any:
    """n a multiple of 8. Asks for the n behind them."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, n, out = args
        with cgutils.for_range_slice(b, const(0), n, const(8), I64) as (at, _):
            offset = b.mul(at, const(4))
            place = b.add(x, offset)
            simd.prefetch(b, b.add(place, b.mul(n, const(4))))
            simd.store(b, load(b, place, VF32), b.add(out, offset))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@jit
def spread(linear, panel, at, n, scales, minima):
    """A panel's scales and minima for inputs [at, at + n), (groups, 16) float32 each; returns whether it has minima:
    else they are zeros. What comes next lies behind them: it is asked for."""
    group, first, count, n_groups = linear[GROUP], 0, 1, 1
    if group != 0:
        n_groups = ((linear[N_IN] + BLOCK - 1) // BLOCK * BLOCK + group - 1) // group
        first, count = at // group, (n + group - 1) // group
    cell = (panel * n_groups + first) * ROWS
    if linear[SCALE_BYTES] == HALF:
        halves_to_floats(linear[SCALES] + 2 * cell, ROWS * count, scales)
    else:
        copy_floats(linear[SCALES] + 4 * cell, ROWS * count, scales)
    if linear[MINIMUM_BYTES] == HALF:
        halves_to_floats(linear[MINIMA] + 2 * cell, ROWS * count, minima)
    elif linear[MINIMUM_BYTES] == FLOAT:
        copy_floats(linear[MINIMA] + 4 * cell, ROWS * count, minima)
    elif linear[MINIMUM_BYTES] == POINT:
        offsets(scales, linear[MINIMA] + cell, 0, ROWS * count, minima)
    elif linear[ZERO] != 0:
        offsets(scales, 0, linear[ZERO], ROWS * count, minima)
    else:
        blocks.fill(minima, 0, ROWS * count, np.float32(0.0))
        return False
    return True
