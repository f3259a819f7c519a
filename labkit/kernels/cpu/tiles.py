# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Register tiles of a float32 product: 16 rows of a panel, one a lane, meet a few tokens, one number at a time. Those
of packed weights are ``integer_tiles``.

    floats_6 ... floats_1 (panel, stride, x, x_stride, n, out, out_stride, fresh, ahead...)

A panel is what ``panels`` makes: word k of 16 rows beside each other, so that a product's sums lie as the output does
and nothing is added up across lanes. Each output of ``floats`` is one chain of multiply-adds over the inputs in order,
through all pieces of its row: however many tokens a tile takes, the sum is the same.

``fresh`` says whether out is written, or added to. The four numbers of ``ahead`` say which line of memory a turn of
the loop asks for, a slice of the rows that are read next, so that the arithmetic hides them (``matmul.ahead_of``).
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from labkit.kernels.cpu import simd
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.simd import F32, I64, VF32, const, load

HALVES = (0, 1)
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
            places = [
                [b.add(b.add(out, b.mul(out_stride, const(t))), const(32 * v)) for v in HALVES] for t in range(tokens)
            ]
            with b.if_then(b.icmp_signed("==", fresh, const(0))):
                for slots, row in zip(sums, places, strict=True):
                    for slot, place in zip(slots, row, strict=True):
                        b.store(load(b, place, VF32), slot)

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
            for slots, row in zip(sums, places, strict=True):
                for slot, place in zip(slots, row, strict=True):
                    simd.store(b, b.load(slot), place)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 12), codegen

    return tile


floats_6, floats_4, floats_2, floats_1 = (make_floats(n) for n in (6, 4, 2, 1))


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
