# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Dot products of weight rows with one activation vector, computed from the packed form.

dot(w, stride, n, x, out)                       fp32, bf16: out[r] = sum_k w[r, k] x[k], in float32
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from labkit.kernels.cpu import simd
from labkit.kernels.cpu.simd import I64, const, load

ROWS = 4
AHEAD = 4096
"""How far ahead of a weight row's reader the next lines are asked for, in bytes."""


def make_dot(kind: str, rows: int) -> Any:
    """Dot products of ``rows`` weight rows stored as ``kind`` (fp32, bf16); n is a multiple of 8.

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


dot_fp32, dot_fp32_one = make_dot("fp32", ROWS), make_dot("fp32", 1)
dot_bf16, dot_bf16_one = make_dot("bf16", ROWS), make_dot("bf16", 1)
