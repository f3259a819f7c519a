# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Dot products of weight rows with one activation vector, computed from the packed form.

    dot(w, stride, n, x, out)                       fp32, bf16, int8: out[r] = sum_k w[r, k] x[k]
    dot(w, n, x, sums, steps, scales, zeros, shift, out)   int4, a panel of 4 rows: out[r] = sum_g s[r,g] (q - z[r,g]) x

The first three multiply in float32: nothing is rounded that the reference does not round. int4 multiplies in integers:
its activations are rounded to int16, with one step a block of 64 (``prepare_int4``).

int4 layout (``labkit.quant.grid.pack_int4``): 64 weights are 16 words of 16 bits, and nibble j of the words is 16
*consecutive* weights: shift, mask, and one instruction multiplies 16 pairs and adds neighbours. The 4 rows of a panel
lie block by block beside each other, so that a panel is one stream of memory.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from labkit.kernels.cpu import simd
from labkit.kernels.cpu.simd import F32, I8, I16, I32, I64, VI32, const, load

ROWS = 4
V4F32, V4I32 = ir.VectorType(F32, ROWS), ir.VectorType(I32, ROWS)
AHEAD = 4096
"""How far ahead of a weight row's reader the next lines are asked for, in bytes."""
BLOCK = 64
"""Weights in one int4 vector of 8 words."""


def make_dot(kind: str, rows: int) -> Any:
    """Dot products of ``rows`` weight rows stored as ``kind`` (fp32, bf16, int8); n is a multiple of 8.

    Four rows share the loads of x: right for keys, which lie in the caches. Weights come from memory, one row after
    the other: four streams at once leave the hardware's prefetcher behind (3.8 GB/s a core where one has 9.5).
    """
    unroll = 2 if rows > 1 else 4

    def body(b: Any, w: Any, stride: Any, x: Any, at: Any, sums: list[Any], lane_block: int) -> None:
        first = b.add(at, const(8 * lane_block))
        xv = load(b, b.add(x, b.shl(first, const(2))), simd.VF32)
        for r in range(rows):
            address = b.add(b.add(w, b.mul(stride, const(r))), b.mul(first, const(simd.ITEMSIZE[kind])))
            slot = sums[r * unroll + lane_block % unroll]
            b.store(simd.fma(b, simd.widen(b, kind, address), xv, b.load(slot)), slot)

    @intrinsic
    def dot(typingctx: Any, w: Any, stride: Any, n: Any, x: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            w, stride, n, x, out = args
            sums = simd.accumulators(b, rows * unroll)
            step = const(8 * unroll)
            whole = b.mul(b.udiv(n, step), step)
            with cgutils.for_range_slice(b, const(0), whole, step, I64) as (at, _):
                if rows == 1:
                    for line in range(0, 8 * unroll * simd.ITEMSIZE[kind], 64):
                        simd.prefetch(b, b.add(w, b.add(b.mul(at, const(simd.ITEMSIZE[kind])), const(AHEAD + line))))
                for i in range(unroll):
                    body(b, w, stride, x, at, sums, i)
            with cgutils.for_range_slice(b, whole, n, const(8), I64) as (at, _):
                body(b, w, stride, x, at, sums, 0)
            whole_rows = []
            for r in range(rows):
                parts = [b.load(slot) for slot in sums[r * unroll : (r + 1) * unroll]]
                while len(parts) > 1:
                    parts = [b.fadd(parts[i], parts[i + 1]) for i in range(0, len(parts), 2)]
                whole_rows.append(parts[0])
            simd.store(b, simd.four_totals(b, whole_rows) if rows == ROWS else simd.total(b, whole_rows[0]), out)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return dot


def make_dot_int4(*, narrow: bool) -> Any:
    """One panel of 4 rows. ``narrow``: groups of 32, two to a block; else groups of 64 2^shift."""

    @intrinsic
    def dot(
        typingctx: Any, w: Any, n: Any, x: Any, sums: Any, steps: Any, scales: Any, zeros: Any, shift: Any, out: Any
    ) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            w, n, x, sums, steps, scales, zeros, shift, out = args
            totals = simd.accumulators(b, ROWS)
            below = cgutils.alloca_once_value(b, ir.Constant(V4F32, [0.0] * ROWS))
            has_zeros = b.icmp_unsigned("!=", zeros, const(0))
            with cgutils.for_range(b, b.udiv(n, const(BLOCK)), intp=I64) as loop:
                block = loop.index
                at = b.add(w, b.mul(block, const(32 * ROWS)))
                for line in range(0, 32 * ROWS, 64):
                    simd.prefetch(b, b.add(at, const(AHEAD + line)))
                x_at = b.add(x, b.mul(block, const(2 * BLOCK)))
                words = [load(b, b.add(at, const(32 * r)), simd.V16I16) for r in range(ROWS)]
                xs = [load(b, b.add(x_at, const(32 * j)), simd.V16I16) for j in range(4)]
                step = simd.splat(b, load(b, b.add(steps, b.mul(block, const(4))), F32), 4)
                for half in (0, 1) if narrow else (0,):
                    group = b.add(b.mul(block, const(2)), const(half)) if narrow else b.lshr(block, shift)
                    part_idx = b.add(b.mul(block, const(2)), const(half)) if narrow else block
                    bits = load(b, b.add(scales, b.mul(group, const(2 * ROWS))), ir.VectorType(I16, ROWS))
                    bits = b.shl(b.zext(bits, V4I32), ir.Constant(V4I32, [13] * ROWS))
                    scale = b.fmul(b.bitcast(bits, V4F32), step)
                    zero = _zeros(b, has_zeros, b.add(zeros, b.mul(group, const(ROWS))))
                    xsum = simd.splat(b, load(b, b.add(sums, b.mul(part_idx, const(4))), F32), 4)
                    lost = b.fmul(zero, xsum)
                    b.store(simd.call(b, "llvm.fma.v4f32", V4F32, scale, lost, b.load(below)), below)
                    nibbles = range(2 * half, 2 * half + 2) if narrow else range(4)
                    for r in range(ROWS):
                        products = [simd.madd(b, _nibble(b, words[r], j), xs[j]) for j in nibbles]
                        while len(products) > 1:
                            products = [b.add(products[i], products[i + 1]) for i in range(0, len(products), 2)]
                        one = b.shuffle_vector(scale, scale, simd.isplat(r))
                        b.store(simd.fma(b, b.sitofp(products[0], simd.VF32), one, b.load(totals[r])), totals[r])
            for r in range(ROWS):
                lost = b.extract_element(b.load(below), ir.Constant(I32, r))
                simd.store(b, b.fsub(simd.total(b, b.load(totals[r])), lost), b.add(out, const(4 * r)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), codegen

    return dot


def _nibble(b: Any, words: Any, j: int) -> Any:
    """Nibble j of each 16-bit word."""
    if j:
        words = b.lshr(words, ir.Constant(simd.V16I16, [4 * j] * 16))
    return words if j == 3 else b.and_(words, ir.Constant(simd.V16I16, [15] * 16))


def _zeros(b: Any, has_zeros: Any, address: Any) -> Any:
    """The zero points of a panel's group; 8 for the symmetric grid, which stores none."""
    before = b.block
    with b.if_then(has_zeros):
        stored = b.sitofp(b.zext(load(b, address, ir.VectorType(I8, ROWS)), V4I32), V4F32)
        inside = b.block
    phi = b.phi(V4F32)
    phi.add_incoming(ir.Constant(V4F32, [8.0] * ROWS), before)
    phi.add_incoming(stored, inside)
    return phi


@intrinsic
def prepare_int4(typingctx: Any, x: Any, n: Any, quantized: Any, sums: Any, steps: Any, narrow: Any) -> Any:
    """Activations for an int4 product: int16 with one step a block of 64, and the pairwise sums that the zero point
    multiplies (two vectors a block when ``narrow``, else one). Steps come times 2^112, which the float16 scales'
    bits, read as float32, lack."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, n, quantized, sums, steps, narrow = args
        is_narrow = b.icmp_unsigned("!=", narrow, const(0))
        ones = ir.Constant(simd.V16I16, [1] * 16)
        with cgutils.for_range(b, b.udiv(n, const(BLOCK)), intp=I64) as loop:
            at = b.add(x, b.mul(loop.index, const(4 * BLOCK)))
            vectors = [load(b, b.add(at, const(32 * j)), simd.VF32) for j in range(8)]
            peak, nothing = simd.fsplat(1e-30), simd.fsplat(0.0)
            for v in vectors:
                nothing = simd.fma(b, v, simd.fsplat(0.0), nothing)  # NaN once anything is not finite
                peak = simd.call(b, "llvm.maxnum.v8f32", simd.VF32, peak, simd.call(b, "llvm.fabs.v8f32", simd.VF32, v))
            top = b.fadd(simd.largest(b, peak), simd.total(b, nothing))
            inverse = simd.splat(b, b.fdiv(ir.Constant(F32, 32767.0), top))
            step = b.fmul(b.fdiv(top, ir.Constant(F32, 32767.0)), ir.Constant(F32, 2.0**112))
            simd.store(b, step, b.add(steps, b.mul(loop.index, const(4))))
            parts = []
            for j in range(4):
                halves = []
                for v in vectors[2 * j : 2 * j + 2]:
                    rounded = simd.call(b, "llvm.nearbyint.v8f32", simd.VF32, b.fmul(v, inverse))
                    halves.append(b.trunc(b.fptosi(rounded, VI32), simd.VI16))
                whole = b.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, 16), list(range(16))))
                simd.store(b, whole, b.add(b.add(quantized, b.mul(loop.index, const(2 * BLOCK))), const(32 * j)))
                parts.append(simd.madd(b, whole, ones))
            low, high = (simd.isum(b, b.add(*parts[i : i + 2])) for i in (0, 2))
            with b.if_else(is_narrow) as (two, one):
                with two:
                    to = b.add(sums, b.mul(loop.index, const(8)))
                    simd.store(b, b.sitofp(low, F32), to)
                    simd.store(b, b.sitofp(high, F32), b.add(to, const(4)))
                with one:
                    simd.store(b, b.sitofp(b.add(low, high), F32), b.add(sums, b.mul(loop.index, const(4))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


dot_fp32, dot_fp32_one = make_dot("fp32", ROWS), make_dot("fp32", 1)
dot_bf16, dot_bf16_one = make_dot("bf16", ROWS), make_dot("bf16", 1)
dot_int8_one = make_dot("int8", 1)
dot_int4_g32, dot_int4_wide = make_dot_int4(narrow=True), make_dot_int4(narrow=False)
