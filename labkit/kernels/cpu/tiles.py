# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Register tiles of a matrix product: 16 rows of a panel, one a lane, meet a few tokens, one number at a time.

    floats_6 ... floats_1 (panel, stride, x, x_stride, n, out, out_stride, fresh, ahead...)
    int16_4 ... int16_1, bytes_4 ... bytes_1
        (panel, x, x_stride, n_words, block_words, grid, grid_stride, starts, steps, steps_stride, steps_shift,
         out, out_stride, fresh, ahead...)
    pairs_6 (panel, x, x_stride, n_words, grid, bias, steps, out, out_stride, fresh)    int16, all one block

A panel is what ``panels`` makes: word k of 16 rows beside each other, so that a product's sums lie as the output does
and nothing is added up across lanes. A word is a float32, two int16 or four bytes: a float32 multiply-add does 8
products an instruction, integers 16 or 32. Integers come in blocks, each with its rows' scales and its tokens' step:
``out += grid[block, row] steps[token, block] * sum``. Bytes have the same scales in all blocks, and ``starts``, one
number a token: what its sum begins with, to take off again what WEIGHT_OFFSET adds.

``fresh`` says whether out is written, or added to. The four numbers of ``ahead`` say which line of memory a turn of
the loop asks for, a slice of the rows that are read next, so that the arithmetic hides them (``matmul.ahead_of``).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from labkit.kernels.cpu import simd
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.memory import WORD
from labkit.kernels.cpu.simd import F32, I32, I64, V16I16, V32I8, VF32, VI32, const, load

HALVES = (0, 1)
WEIGHT_OFFSET = 128
"""What is added to weights in bytes, which the instruction wants without sign: their sign bit is turned round."""


UNROLLED = 4
"""Words that a turn of a tile's loop takes: whatever stands beside the arithmetic is shared by so many."""


def _ask(b: Any, k: Any, ahead: list[Any]) -> None:
    """Ask for a line at word k: rows ``stride`` bytes apart take turns, each as fast as this panel is gone through."""
    at, stride, shift, size_shift = ahead
    unrolled = const(UNROLLED.bit_length() - 1)  # as a power of two
    turn = b.lshr(k, unrolled)
    mask = b.sub(b.shl(const(1), shift), const(1))
    column = b.shl(b.lshr(turn, shift), b.add(b.add(shift, size_shift), unrolled))
    simd.prefetch(b, b.add(b.add(at, b.mul(b.and_(turn, mask), stride)), column))


def _ask_for_block(b: Any, block: Any, ahead: list[Any]) -> None:
    """Ask for what a block takes of each row, 2^size bytes. Here, because a loop of integers has no register left."""
    at, stride, shift, size_shift = ahead
    at = b.add(at, b.shl(block, size_shift))
    with cgutils.for_range(b, b.shl(const(1), shift), intp=I64) as loop:
        simd.prefetch(b, b.add(at, b.mul(loop.index, stride)))


def _put(b: Any, sums: list[list[Any]], out: Any, out_stride: Any, fresh: Any) -> None:
    """The tile's sums to out, or on top of what is there."""
    again = b.icmp_signed("==", fresh, const(0))
    places = [[b.add(b.add(out, b.mul(out_stride, const(t))), const(32 * v)) for v in HALVES] for t in range(len(sums))]
    with b.if_then(again):
        for slots, row in zip(sums, places, strict=True):
            for slot, place in zip(slots, row, strict=True):
                b.store(b.fadd(b.load(slot), load(b, place, VF32)), slot)
    for slots, row in zip(sums, places, strict=True):
        for slot, place in zip(slots, row, strict=True):
            simd.store(b, b.load(slot), place)


def make_floats(tokens: int) -> Any:
    """``tokens`` rows of x, float32, meet a panel whose words are ``stride`` bytes apart."""

    @intrinsic
    def tile(
        typingctx: Any, panel: Any, stride: Any, x: Any, x_stride: Any, n: Any, out: Any, out_stride: Any, fresh: Any,
        ahead: Any, ahead_stride: Any, ahead_shift: Any, ahead_size: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            panel, stride, x, x_stride, n, out, out_stride, fresh, *ahead = args
            sums = [simd.accumulators(b, 2) for _ in range(tokens)]

            def word(k: Any) -> None:
                at = b.add(panel, b.mul(k, stride))
                rows = [load(b, b.add(at, const(32 * v)), VF32) for v in HALVES]
                for t in range(tokens):
                    number = load(b, b.add(b.add(x, b.mul(x_stride, const(t))), b.mul(k, const(4))), F32)
                    wide = simd.splat(b, number)
                    for row, slot in zip(rows, sums[t], strict=True):
                        b.store(simd.fma(b, row, wide, b.load(slot)), slot)

            whole = b.and_(n, const(-UNROLLED))
            with cgutils.for_range_slice(b, const(0), whole, const(UNROLLED), I64) as (first, _):
                _ask(b, first, ahead)
                for i in range(UNROLLED):
                    word(b.add(first, const(i)))
            with cgutils.for_range_slice(b, whole, n, const(1), I64) as (k, _):
                word(k)
            _put(b, sums, out, out_stride, fresh)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 12), codegen

    return tile


def make_integers(tokens: int, *, of_bytes: bool) -> Any:
    """``tokens`` rows of int16 pairs, or of four bytes, meet a panel of the like."""
    kind = V32I8 if of_bytes else V16I16

    @intrinsic
    def tile(
        typingctx: Any, panel: Any, x: Any, x_stride: Any, n_words: Any, block_words: Any, grid: Any, grid_stride: Any,
        starts: Any, steps: Any, steps_stride: Any, steps_shift: Any, out: Any, out_stride: Any, fresh: Any,
        ahead: Any, ahead_stride: Any, ahead_shift: Any, ahead_size: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            panel, x, x_stride, n_words, block_words, grid, grid_stride, starts, steps, steps_stride, steps_shift = (
                args[:11]
            )
            out, out_stride, fresh, *ahead = args[11:]
            sums = [simd.accumulators(b, 2) for _ in range(tokens)]
            if of_bytes:
                new = b.icmp_signed("!=", fresh, const(0))
                for t in range(tokens):
                    start = load(b, b.add(starts, const(4 * t)), F32)
                    for slot in sums[t]:
                        b.store(simd.splat(b, b.select(new, start, ir.Constant(F32, 0.0))), slot)
            inner = [[cgutils.alloca_once(b, VI32) for _ in HALVES] for _ in range(tokens)]

            def scale(v: int, block: Any) -> Any:
                return load(b, b.add(grid, b.add(b.mul(block, grid_stride), const(32 * v))), VF32)

            def word(k: Any) -> None:
                at = b.add(panel, b.mul(k, const(WORD)))
                rows = [load(b, b.add(at, const(32 * v)), kind) for v in HALVES]
                for t in range(tokens):
                    number = load(b, b.add(b.add(x, b.mul(x_stride, const(t))), b.mul(k, const(4))), I32)
                    wide = b.bitcast(simd.splat(b, number), kind)
                    for row, slot in zip(rows, inner[t], strict=True):
                        if of_bytes:
                            b.store(simd.dot_bytes(b, row, wide, b.load(slot)), slot)
                        else:
                            b.store(b.add(simd.madd(b, wide, row), b.load(slot)), slot)

            with cgutils.for_range_slice(b, const(0), n_words, block_words, I64) as (first, block):
                for slots in inner:
                    for slot in slots:
                        b.store(ir.Constant(VI32, [0] * 8), slot)
                end = b.add(first, block_words)
                end = b.select(b.icmp_signed("<", end, n_words), end, n_words)
                _ask_for_block(b, block, ahead)
                with cgutils.for_range_slice(b, first, end, const(1), I64) as (k, _):
                    word(k)
                column = b.mul(b.lshr(block, steps_shift), const(4))
                for t in range(tokens):
                    step = load(b, b.add(b.add(steps, b.mul(steps_stride, const(t))), column), F32)
                    wide = simd.splat(b, step)
                    for v in HALVES:
                        factor = wide if of_bytes else b.fmul(wide, scale(v, block))
                        b.store(
                            simd.fma(b, b.sitofp(b.load(inner[t][v]), VF32), factor, b.load(sums[t][v])), sums[t][v]
                        )
            if of_bytes:
                for slots in sums:
                    for v, slot in enumerate(slots):
                        b.store(b.fmul(b.load(slot), scale(v, const(0))), slot)
            _put(b, sums, out, out_stride, fresh)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 18), codegen

    return tile


@intrinsic
def pairs_6(
    typingctx: Any, panel: Any, x: Any, x_stride: Any, n_words: Any, grid: Any, bias: Any, steps: Any, out: Any,
    out_stride: Any, fresh: Any,
) -> Any:  # fmt: skip
    """Six rows of x, pairs of int16, meet a panel of the like, all one block: a product of attention.

    out = or += grid[row] steps[token] * sum + bias[row]; n_words a multiple of 2."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        panel, x, x_stride, n_words, grid, bias, steps, out, out_stride, fresh = args
        sums = [[cgutils.alloca_once_value(b, ir.Constant(VI32, [0] * 8)) for _ in HALVES] for _ in range(6)]
        with cgutils.for_range_slice(b, const(0), n_words, const(2), I64) as (first, _):
            for i in range(2):
                k = b.add(first, const(i))
                at = b.add(panel, b.mul(k, const(WORD)))
                rows = [load(b, b.add(at, const(32 * v)), V16I16) for v in HALVES]
                for t in range(6):
                    number = load(b, b.add(b.add(x, b.mul(x_stride, const(t))), b.mul(k, const(4))), I32)
                    wide = b.bitcast(simd.splat(b, number), V16I16)
                    for row, slot in zip(rows, sums[t], strict=True):
                        b.store(b.add(simd.madd(b, wide, row), b.load(slot)), slot)
        scales, more = ([load(b, b.add(at, const(32 * v)), VF32) for v in HALVES] for at in (grid, bias))
        scaled = [simd.accumulators(b, 2) for _ in range(6)]
        for t in range(6):
            step = simd.splat(b, load(b, b.add(steps, const(4 * t)), F32))
            for v in HALVES:
                sum_ = b.sitofp(b.load(sums[t][v]), VF32)
                b.store(simd.fma(b, sum_, b.fmul(step, scales[v]), more[v]), scaled[t][v])
        _put(b, scaled, out, out_stride, fresh)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), codegen


floats_6, floats_4, floats_2, floats_1 = (make_floats(n) for n in (6, 4, 2, 1))
int16_4, int16_2, int16_1 = (make_integers(n, of_bytes=False) for n in (4, 2, 1))
bytes_4, bytes_2, bytes_1 = (make_integers(n, of_bytes=True) for n in (4, 2, 1))


@jit
def floats(n_tokens, given):
    """A tile of 6, 4, 2 or 1 tokens, the most that ``n_tokens`` allow; returns how many. given: a tile's arguments."""
    if n_tokens >= 6:
        floats_6(*given)
        return 6
    if n_tokens >= 4:
        floats_4(*given)
        return 4
    if n_tokens >= 2:
        floats_2(*given)
        return 2
    floats_1(*given)
    return 1


@jit
def integers(n_tokens, of_bytes, given):
    """A tile of 4, 2 or 1 tokens of int16 or of bytes; returns how many."""
    if of_bytes:
        if n_tokens >= 4:
            bytes_4(*given)
            return 4
        if n_tokens >= 2:
            bytes_2(*given)
            return 2
        bytes_1(*given)
        return 1
    if n_tokens >= 4:
        int16_4(*given)
        return 4
    if n_tokens >= 2:
        int16_2(*given)
        return 2
    int16_1(*given)
    return 1
