# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Rows of plain numbers, keys or weights, and a few vectors: sixteen rows at a time, turned so that each has a lane.

    score(bf16, n_heads, q, q_stride, n_dims, k, k_stride, n_keys, s, s_stride, ask)      s[r, i] = q[r] . k[i]

One chain of multiply-adds over the dims for each sum, as ``tiles.floats`` has it for rows in panels: the same bits.
Sums are written in whole vectors: up to 15 numbers behind the last are overwritten. ``ask``: memory that is read next,
as much as the rows take; it is asked for on the way.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from labkit.kernels.cpu import simd
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.panels import transpose
from labkit.kernels.cpu.simd import F32, I64, VF32, VI32, const, load

MOST_HEADS = 4


def make_score(kind: str, n_heads: int) -> Any:
    """For ``n_heads`` queries; n_dims a multiple of 8."""
    size = simd.ITEMSIZE[kind]

    @intrinsic
    def score(
        typingctx: Any, q: Any, q_stride: Any, n_dims: Any, k: Any, k_stride: Any, n_keys: Any, s: Any, s_stride: Any,
        ask: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            q, q_stride, n_dims, k, k_stride, n_keys, s, s_stride, ask = args
            last = b.sub(n_keys, const(1))
            with cgutils.for_range_slice(b, const(0), n_keys, const(16), I64) as (first, _):
                sums = [simd.accumulators(b, 2) for _ in range(n_heads)]
                rows = []
                for i in range(16):
                    idx = b.add(first, const(i))
                    idx = b.select(b.icmp_signed("<", idx, last), idx, last)
                    rows.append(b.add(k, b.mul(idx, k_stride)))
                with cgutils.for_range_slice(b, const(0), n_dims, const(8), I64) as (dim, _):
                    offset = b.mul(dim, const(size))
                    next_ = b.add(b.add(ask, b.mul(first, k_stride)), b.mul(dim, const(16 * size)))
                    for line in range(0, 128 * size, 64):
                        simd.prefetch(b, b.add(next_, const(line)))
                    halves = []
                    for half in (rows[:8], rows[8:]):
                        words = [b.bitcast(simd.widen(b, kind, b.add(row, offset)), VI32) for row in half]
                        halves.append([b.bitcast(v, VF32) for v in transpose(b, words)])
                    for c in range(8):
                        for r in range(n_heads):
                            at = b.add(b.add(q, b.mul(q_stride, const(r))), b.mul(b.add(dim, const(c)), const(4)))
                            wide = simd.splat(b, load(b, at, F32))
                            for half, slot in zip(halves, sums[r], strict=True):
                                b.store(simd.fma(b, half[c], wide, b.load(slot)), slot)
                for r in range(n_heads):
                    home = b.add(b.add(s, b.mul(s_stride, const(r))), b.mul(first, const(4)))
                    for half, slot in enumerate(sums[r]):
                        simd.store(b, b.load(slot), b.add(home, const(32 * half)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), codegen

    return score


fp32_1, fp32_2, fp32_3, fp32_4 = (make_score("fp32", n) for n in (1, 2, 3, 4))
bf16_1, bf16_2, bf16_3, bf16_4 = (make_score("bf16", n) for n in (1, 2, 3, 4))


@jit
def score(bf16, n_heads, q, q_stride, n_dims, k, k_stride, n_keys, s, s_stride, ask):
    """For any number of query heads, the most at once first."""
    while n_heads > 0:
        n = min(n_heads, MOST_HEADS)
        given = q, q_stride, n_dims, k, k_stride, n_keys, s, s_stride, ask
        if bf16:
            if n == 4:
                bf16_4(*given)
            elif n == 3:
                bf16_3(*given)
            elif n == 2:
                bf16_2(*given)
            else:
                bf16_1(*given)
        elif n == 4:
            fp32_4(*given)
        elif n == 3:
            fp32_3(*given)
        elif n == 2:
            fp32_2(*given)
        else:
            fp32_1(*given)
        q, s, n_heads = q + n * q_stride, s + n * s_stride, n_heads - n
