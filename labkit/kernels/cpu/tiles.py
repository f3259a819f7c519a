# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Register tiles of a matrix product: 4 weight rows times a few tokens, lanes along the inputs.

    tile_fp32(w, x, x_stride, n, out, out_stride, ahead)   w (4, n) float32 unpacked; x rows; out[token, row]
    tile_int16(w, x, x_stride, n, scales, sums, steps, out, out_stride, ahead)
                                                       in integers: 16 products an instruction, sums in int32
    tile_bytes(the same)                               int8 weights as they lie, and rounded tokens: 32 products
    unpack_*                                             a weight row to float32 or int16, once for many tokens

``ahead`` is an address from which a tile asks for one line a turn, as many bytes as its own row: what is read from
memory next, so that the arithmetic hides it. All at once they would stop the loads (measured: slower than none).

A float32 multiply-add does 8 products; on int16 one instruction does 16 and adds neighbours, and more units can run it.
So int8 weights meet activations rounded to as many of 16 bits as keep the sum of n products within int32.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from labkit.kernels.cpu import simd
from labkit.kernels.cpu.simd import F32, I8, I16, I32, I64, V16I8, V16I16, V16I32, V32I8, VF32, VI32, const, load

ROWS = 4


def make_tile(tokens: int) -> Any:
    """4 rows and ``tokens`` tokens of float32; n a multiple of 8."""

    @intrinsic
    def tile(typingctx: Any, w: Any, x: Any, x_stride: Any, n: Any, out: Any, out_stride: Any, ahead: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            w, x, x_stride, n, out, out_stride, ahead = args
            sums = simd.accumulators(b, ROWS * tokens)
            w_stride = b.mul(n, const(4))
            with cgutils.for_range_slice(b, const(0), n, const(8), I64) as (at, _):
                offset = b.mul(at, const(4))
                simd.prefetch(b, b.add(ahead, offset))
                xs = [load(b, b.add(b.add(x, b.mul(x_stride, const(t))), offset), VF32) for t in range(tokens)]
                for r in range(ROWS):
                    row = load(b, b.add(b.add(w, b.mul(w_stride, const(r))), offset), VF32)
                    for t in range(tokens):
                        slot = sums[r * tokens + t]
                        b.store(simd.fma(b, row, xs[t], b.load(slot)), slot)
            for t in range(tokens):
                four = simd.four_totals(b, [b.load(slot) for slot in sums[t::tokens]])
                simd.store(b, four, b.add(out, b.mul(out_stride, const(t))))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return tile


def make_tile_integer(tokens: int, *, of_bytes: bool) -> Any:
    """4 rows and ``tokens`` tokens of int16, or of int8 weights and tokens that hold q + TOKEN_OFFSET in bytes.

    n is a multiple of 16, or 32. scales (4,) float32 and steps (tokens,) float32 turn the integers into numbers;
    sums (4,) int32 are the rows' sums, with which the offset is taken off again (not read for int16).
    """
    lanes, size, kind = (32, 1, V32I8) if of_bytes else (16, 2, V16I16)
    v4i32, v4f32 = ir.VectorType(I32, 4), ir.VectorType(F32, 4)

    @intrinsic
    def tile(
        typingctx: Any, w: Any, x: Any, x_stride: Any, n: Any, scales: Any, sums: Any, steps: Any, out: Any,
        out_stride: Any, ahead: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            w, x, x_stride, n, scales, sums, steps, out, out_stride, ahead = args
            totals = [cgutils.alloca_once_value(b, ir.Constant(VI32, [0] * 8)) for _ in range(ROWS * tokens)]
            w_stride = b.mul(n, const(size))
            with cgutils.for_range_slice(b, const(0), n, const(lanes), I64) as (at, _):
                offset = b.mul(at, const(size))
                simd.prefetch(b, b.add(ahead, offset))
                xs = [load(b, b.add(b.add(x, b.mul(x_stride, const(t))), offset), kind) for t in range(tokens)]
                for r in range(ROWS):
                    row = load(b, b.add(b.add(w, b.mul(w_stride, const(r))), offset), kind)
                    for t in range(tokens):
                        slot = totals[r * tokens + t]
                        before = b.load(slot)
                        if of_bytes:
                            b.store(simd.dot_bytes(b, xs[t], row, before), slot)
                        else:
                            b.store(b.add(simd.madd(b, row, xs[t]), before), slot)
            scale = load(b, scales, v4f32)
            below = b.mul(load(b, sums, v4i32), ir.Constant(v4i32, [TOKEN_OFFSET] * 4)) if of_bytes else None
            for t in range(tokens):
                four = simd.four_totals(b, [b.load(slot) for slot in totals[t::tokens]])
                four = b.sitofp(b.sub(four, below) if of_bytes else four, v4f32)
                step = simd.splat(b, load(b, b.add(steps, const(4 * t)), F32), 4)
                four = b.fmul(b.fmul(four, scale), step)
                simd.store(b, four, b.add(out, b.mul(out_stride, const(t))))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), codegen

    return tile


TOKEN_OFFSET = 64
tile_bytes_2, tile_bytes_1 = make_tile_integer(2, of_bytes=True), make_tile_integer(1, of_bytes=True)
tile_int16_2, tile_int16_1 = make_tile_integer(2, of_bytes=False), make_tile_integer(1, of_bytes=False)
tile_fp32_3, tile_fp32_1 = make_tile(3), make_tile(1)


@intrinsic
def unpack_int8(typingctx: Any, w: Any, n: Any, out: Any) -> Any:
    """A row of int8 to int16; n a multiple of 16."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        w, n, out = args
        with cgutils.for_range_slice(b, const(0), n, const(16), I64) as (at, _):
            simd.store(b, b.sext(load(b, b.add(w, at), V16I8), V16I16), b.add(out, b.mul(at, const(2))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def unpack_bf16(typingctx: Any, w: Any, n: Any, out: Any) -> Any:
    """A row of bf16 to float32; n a multiple of 8."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        w, n, out = args
        with cgutils.for_range_slice(b, const(0), n, const(8), I64) as (at, _):
            simd.store(b, simd.widen(b, "bf16", b.add(w, b.mul(at, const(2)))), b.add(out, b.mul(at, const(4))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def unpack_int4(typingctx: Any, w: Any, n_blocks: Any, scales: Any, zeros: Any, group: Any, out: Any) -> Any:
    """A panel of 4 packed int4 rows to float32 (4, 64 n_blocks): s (q - z)."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        w, n_blocks, scales, zeros, group, out = args
        has_zeros = b.icmp_unsigned("!=", zeros, const(0))
        row_bytes = b.mul(n_blocks, const(256))
        with cgutils.for_range(b, n_blocks, intp=I64) as loop:
            for r in range(ROWS):
                words = load(b, b.add(w, b.add(b.mul(loop.index, const(128)), const(32 * r))), V16I16)
                to = b.add(out, b.add(b.mul(row_bytes, const(r)), b.mul(loop.index, const(256))))
                for half in (0, 1):  # a group covers at least half a block
                    first = b.add(b.mul(loop.index, const(64)), const(32 * half))
                    cell = b.add(b.mul(b.udiv(first, group), const(ROWS)), const(r))
                    scale = simd.scale_from_half(b, load(b, b.add(scales, b.mul(cell, const(2))), I16))
                    before = b.block
                    with b.if_then(has_zeros):
                        stored = b.sitofp(b.zext(load(b, b.add(zeros, cell), I8), I32), F32)
                        inside = b.block
                    zero = b.phi(F32)
                    zero.add_incoming(ir.Constant(F32, 8.0), before)
                    zero.add_incoming(stored, inside)
                    scale, zero = simd.splat(b, scale), simd.splat(b, zero)
                    for j in (2 * half, 2 * half + 1):
                        shifted = b.lshr(words, ir.Constant(V16I16, [4 * j] * 16))
                        wide = b.zext(b.and_(shifted, ir.Constant(V16I16, [15] * 16)), V16I32)
                        for part in (0, 1):
                            lanes = ir.Constant(VI32, list(range(8 * part, 8 * part + 8)))
                            q = b.sitofp(b.shuffle_vector(wide, wide, lanes), VF32)
                            simd.store(b, b.fmul(b.fsub(q, zero), scale), b.add(to, const(64 * j + 32 * part)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


@intrinsic
def peak(typingctx: Any, x: Any, n: Any) -> Any:
    """max |x|, NaN when x is not finite: rounding to integers would hide it. n a multiple of 8."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, n = args
        slot, nothing = simd.accumulators(b, 2)
        with cgutils.for_range_slice(b, const(0), n, const(8), I64) as (at, _):
            v = simd.call(b, "llvm.fabs.v8f32", VF32, load(b, b.add(x, b.mul(at, const(4))), VF32))
            b.store(simd.call(b, "llvm.maxnum.v8f32", VF32, v, b.load(slot)), slot)
            b.store(simd.fma(b, v, simd.fsplat(0.0), b.load(nothing)), nothing)
        return b.fadd(simd.largest(b, b.load(slot)), simd.total(b, b.load(nothing)))

    return types.float32(types.int64, types.int64), codegen


def make_round(kind: Any, offset: int) -> Any:
    """round(x * factor) + offset as ``kind`` integers; n a multiple of 8."""

    @intrinsic
    def round_to(typingctx: Any, x: Any, n: Any, factor: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            x, n, factor, out = args
            wide = simd.splat(b, factor)
            with cgutils.for_range_slice(b, const(0), n, const(8), I64) as (at, _):
                v = b.fmul(load(b, b.add(x, b.mul(at, const(4))), VF32), wide)
                v = b.fptosi(simd.call(b, "llvm.nearbyint.v8f32", VF32, v), VI32)
                v = b.trunc(b.add(v, simd.isplat(offset)), ir.VectorType(kind, 8))
                simd.store(b, v, b.add(out, b.mul(at, const(kind.width // 8))), 1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.float32, types.int64), codegen

    return round_to


round_int16, round_bytes = make_round(I16, 0), make_round(I8, TOKEN_OFFSET)
