# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""The small vector loops of a step between its products, in vectors of 8 lanes. Addresses are int64, widths n.

mix            out[d] += sum_s p[s] v[s, d]            values weighted by attention
widen_bf16     bf16 to float32                         n a multiple of 8
scaled_peak    x *= factor in place; the largest       n a multiple of 8
highest        the largest                             n a multiple of 8
exponentials   x[i] = exp(x[i] - shift); their sum     n a multiple of 8
gate           out[i] = silu(g[i]) * u[i]              n a multiple of 8
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from labkit.kernels.cpu import simd
from labkit.kernels.cpu.simd import F32, I64, VF32, const, load


def make_mix(kind: str) -> Any:
    """Weighted sum of value rows stored as ``kind``; n a multiple of 8."""
    size = simd.ITEMSIZE[kind]

    def strip(b: Any, width: int, v: Any, stride: Any, n_keys: Any, p: Any, out: Any) -> None:
        sums = [cgutils.alloca_once(b, VF32) for _ in range(width)]
        for i, slot in enumerate(sums):
            b.store(load(b, b.add(out, const(32 * i)), VF32), slot)
        with cgutils.for_range(b, n_keys, intp=I64) as loop:
            weight = simd.splat(b, load(b, b.add(p, b.mul(loop.index, const(4))), F32))
            row = b.add(v, b.mul(loop.index, stride))
            for i, slot in enumerate(sums):
                values = simd.widen(b, kind, b.add(row, const(8 * size * i)))
                b.store(simd.fma(b, weight, values, b.load(slot)), slot)
        for i, slot in enumerate(sums):
            simd.store(b, b.load(slot), b.add(out, const(32 * i)))

    @intrinsic
    def mix(typingctx: Any, v: Any, stride: Any, n_keys: Any, p: Any, n: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            v, stride, n_keys, p, n, out = args
            wide = b.mul(b.udiv(n, const(64)), const(64))
            with cgutils.for_range_slice(b, const(0), wide, const(64), I64) as (at, _):
                strip(b, 8, b.add(v, b.mul(at, const(size))), stride, n_keys, p, b.add(out, b.mul(at, const(4))))
            with cgutils.for_range_slice(b, wide, n, const(8), I64) as (at, _):
                strip(b, 1, b.add(v, b.mul(at, const(size))), stride, n_keys, p, b.add(out, b.mul(at, const(4))))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return mix


@intrinsic
def widen_bf16(typingctx: Any, x: Any, n: Any, out: Any) -> Any:
    """n bf16 to float32; n a multiple of 8."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, n, out = args
        with cgutils.for_range_slice(b, const(0), n, const(8), I64) as (at, _):
            simd.store(b, simd.widen(b, "bf16", b.add(x, b.mul(at, const(2)))), b.add(out, b.mul(at, const(4))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def highest(typingctx: Any, x: Any, n: Any) -> Any:
    """The largest of x; n a multiple of 8."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, n = args
        top = cgutils.alloca_once_value(b, simd.fsplat(-3e38))
        with cgutils.for_range_slice(b, const(0), n, const(8), I64) as (at, _):
            v = load(b, b.add(x, b.mul(at, const(4))), VF32)
            b.store(simd.larger(b, v, b.load(top)), top)
        return simd.largest(b, b.load(top))

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def scaled_peak(typingctx: Any, x: Any, n: Any, factor: Any) -> Any:
    """x *= factor in place; returns the largest; n a multiple of 8."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, n, factor = args
        top = cgutils.alloca_once_value(b, simd.fsplat(-3e38))
        wide = simd.splat(b, factor)
        with cgutils.for_range_slice(b, const(0), n, const(8), I64) as (at, _):
            address = b.add(x, b.mul(at, const(4)))
            y = b.fmul(load(b, address, VF32), wide)
            simd.store(b, y, address)
            b.store(simd.larger(b, y, b.load(top)), top)
        return simd.largest(b, b.load(top))

    return types.float32(types.int64, types.int64, types.float32), codegen


mix_fp32, mix_bf16 = make_mix("fp32"), make_mix("bf16")


@intrinsic
def exponentials(typingctx: Any, x: Any, n: Any, shift: Any) -> Any:
    """exp(x - shift) in place; returns the sum."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, n, shift = args
        (total,) = simd.accumulators(b, 1)
        minus = simd.splat(b, shift)
        with cgutils.for_range_slice(b, const(0), n, const(8), I64) as (at, _):
            address = b.add(x, b.mul(at, const(4)))
            y = simd.exp(b, b.fsub(load(b, address, VF32), minus))
            simd.store(b, y, address)
            b.store(b.fadd(b.load(total), y), total)
        return simd.total(b, b.load(total))

    return types.float32(types.int64, types.int64, types.float32), codegen


@intrinsic
def gate(typingctx: Any, g: Any, u: Any, n: Any, out: Any) -> Any:
    """silu(g) * u = g * u / (1 + exp(-g))."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        g, u, n, out = args
        with cgutils.for_range_slice(b, const(0), n, const(8), I64) as (at, _):
            offset = b.mul(at, const(4))
            gv, uv = load(b, b.add(g, offset), VF32), load(b, b.add(u, offset), VF32)
            below = b.fadd(simd.fsplat(1.0), simd.exp(b, b.fsub(ir.Constant(VF32, [0.0] * 8), gv)))
            simd.store(b, b.fdiv(b.fmul(gv, uv), below), b.add(out, offset))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def array_at(typingctx: Any, address: Any) -> Any:
    """An address as a pointer that ``numba.carray`` takes."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@intrinsic
def square_sum(typingctx: Any, x: Any, n: Any) -> Any:
    """sum x^2; n a multiple of 8."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, n = args
        (total,) = simd.accumulators(b, 1)
        with cgutils.for_range_slice(b, const(0), n, const(8), I64) as (at, _):
            v = load(b, b.add(x, b.mul(at, const(4))), VF32)
            b.store(simd.fma(b, v, v, b.load(total)), total)
        return simd.total(b, b.load(total))

    return types.float32(types.int64, types.int64), codegen
