# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""AMX: sixteen tokens of bytes meet sixteen rows of bytes in one instruction, a block of up to 64 inputs.

    sums[t, o] += sum over i of x[t, i] (signed) w[o, i] (unsigned)      int32, exact

A panel of W8A8 (``integer_tiles.unsigned_bytes``) is a tile already: 64 bytes hold four inputs of each row. A token's
record holds its bytes in order, and the records lie ``x_stride`` bytes apart, so nothing is copied. Around the sums are
the operations of ``integer_tiles``, in the same order: the same bits.

The tiles' shapes are a state of the thread. Every call sets them and leaves none, so that no other code meets them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from labkit.kernels.cpu import simd
from labkit.kernels.cpu.simd import F32, I8, I16, I32, I64, const, load

TOKENS = LANES = 16
LINE = 64
SUMS, INPUTS, WEIGHTS = (ir.Constant(I8, number) for number in (0, 1, 2))
"""Three of the eight tiles."""
VOID, BYTES = ir.VoidType(), I8.as_pointer()


def configure(b: Any, input_bytes: Any) -> None:
    """Sums (16, 16) int32, inputs (16, ``input_bytes``) bytes, weights (``input_bytes`` / 4, 64) bytes."""
    shapes = b.bitcast(cgutils.alloca_once(b, ir.ArrayType(I64, LINE // 8)), BYTES)
    words = b.bitcast(shapes, I64.as_pointer())
    for i in range(LINE // 8):
        b.store(const(1 if i == 0 else 0), b.gep(words, [const(i)]))  # palette 1
    columns = [ir.Constant(I16, LINE), b.trunc(input_bytes, I16), ir.Constant(I16, LINE)]
    rows = [ir.Constant(I8, TOKENS), ir.Constant(I8, TOKENS), b.trunc(b.lshr(input_bytes, const(2)), I8)]
    for number, (width, height) in enumerate(zip(columns, rows, strict=True)):
        b.store(width, b.bitcast(b.gep(shapes, [const(16 + 2 * number)]), I16.as_pointer()), align=1)
        b.store(height, b.gep(shapes, [const(48 + number)]))
    simd.call(b, "llvm.x86.ldtilecfg", VOID, shapes)


def release(b: Any) -> None:
    simd.call(b, "llvm.x86.tilerelease", VOID)


def multiply(b: Any, inputs: Any, stride: Any, weights: Any, sums: Any) -> None:
    """A block at addresses ``inputs`` and ``weights``: its 16 rows of 16 sums to ``sums``, 64 bytes apart."""
    simd.call(b, "llvm.x86.tilezero", VOID, SUMS)
    simd.call(b, "llvm.x86.tileloadd64", VOID, INPUTS, b.inttoptr(inputs, BYTES), stride)
    simd.call(b, "llvm.x86.tileloadd64", VOID, WEIGHTS, b.inttoptr(weights, BYTES), const(LINE))
    simd.call(b, "llvm.x86.tdpbsud", VOID, SUMS, INPUTS, WEIGHTS)
    simd.call(b, "llvm.x86.tilestored64", VOID, SUMS, b.inttoptr(sums, BYTES), const(LINE))


@intrinsic
def of_unsigned(
    typingctx: Any, panel: Any, n_blocks: Any, block_units: Any, x: Any, x_stride: Any, steps: Any, sums: Any,
    step_shift: Any, scales: Any, minima: Any, group_shift: Any, out: Any, out_stride: Any, fresh: Any, ask: Any,
    n_ask: Any,
) -> Any:  # fmt: skip
    """What ``integer_tiles.make_tile(16, unsigned_bytes)`` would be, with its arguments."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        panel, n_blocks, block_units, x, x_stride, steps, sums, step_shift = args[:8]
        scales, _, group_shift, out, out_stride, fresh, ask, n_ask = args[8:]
        wide, exact = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
        apart = [b.mul(x_stride, const(t)) for t in range(TOKENS)]
        outs = [b.add(out, b.mul(out_stride, const(t))) for t in range(TOKENS)]
        totals = simd.accumulators(b, TOKENS, LANES)
        with b.if_then(b.icmp_signed("==", fresh, const(0))):
            for slot, place in zip(totals, outs, strict=True):
                b.store(load(b, place, wide), slot)
        size = b.mul(block_units, const(8))
        found = b.ptrtoint(cgutils.alloca_once(b, ir.ArrayType(exact, TOKENS)), I64)
        configure(b, size)
        with cgutils.for_range(b, n_blocks, intp=I64) as loop:
            block, cell = loop.index, b.mul(loop.index, const(4))
            simd.prefetch_lines(b, ask, block, n_ask)
            at = b.mul(block, size)
            multiply(b, b.add(x, at), x_stride, b.add(panel, b.mul(at, const(LANES))), found)
            scale = load(b, b.add(scales, b.mul(b.lshr(block, group_shift), const(LINE))), wide)
            column = b.mul(b.lshr(block, step_shift), const(4))
            for t, slot in enumerate(totals):
                start = simd.splat(b, load(b, b.add(b.add(sums, apart[t]), cell), I32), LANES)
                whole = b.sitofp(b.add(load(b, b.add(found, const(LINE * t)), exact), start), wide)
                step = simd.splat(b, load(b, b.add(b.add(steps, apart[t]), column), F32), LANES)
                b.store(simd.fma(b, whole, b.fmul(step, scale), b.load(slot)), slot)
        release(b)
        for slot, place in zip(totals, outs, strict=True):
            simd.store(b, b.load(slot), place)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 16), codegen
