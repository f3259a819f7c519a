# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Sixteen stored rows to a panel that ``tiles`` multiplies: word k of all rows beside each other.

    pack_fp32, pack_bf16     rows to float32, one number a word

Each takes 8 rows, ``half`` of the panel; rows beyond the last are the last once more. A panel is made once for all of
a prompt's tokens and lies in the first-level cache while they pass.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from labkit.kernels.cpu import simd
from labkit.kernels.cpu.memory import WORD
from labkit.kernels.cpu.simd import I64, VI32, const


def transpose(b: Any, rows: list[Any]) -> list[Any]:
    """Eight vectors of eight words, columns for rows."""

    def pick(x: Any, y: Any, order: list[int]) -> Any:
        return b.shuffle_vector(x, y, ir.Constant(VI32, order))

    low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    pairs = [pick(rows[i], rows[i + 1], order) for i in (0, 2, 4, 6) for order in (low, high)]
    low, high = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    fours = [pick(pairs[i + j], pairs[i + j + 2], order) for i in (0, 4) for j in (0, 1) for order in (low, high)]
    low, high = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    return [pick(fours[j], fours[j + 4], order) for order in (low, high) for j in range(4)]


def _store(b: Any, vectors: list[Any], out: Any, word: Any, half: Any) -> None:
    at = b.add(out, b.add(b.mul(word, const(WORD)), b.mul(half, const(32))))
    for i, vector in enumerate(vectors):
        simd.store(b, vector, b.add(at, const(WORD * i)))


def _rows_at(b: Any, w: Any, stride: Any, half: Any, last: Any) -> list[Any]:
    """The addresses of eight rows, or of row ``last`` for those behind it."""
    found = []
    for r in range(8):
        row = b.add(b.mul(half, const(8)), const(r))
        row = b.select(b.icmp_signed("<", row, last), row, last)
        found.append(b.add(w, b.mul(row, stride)))
    return found


def make_pack(kind: str) -> Any:
    """Eight rows of ``n`` numbers from address w on; n a multiple of 8."""
    size = {"fp32": 4, "bf16": 2}[kind]

    @intrinsic
    def pack(typingctx: Any, w: Any, stride: Any, last: Any, n: Any, half: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            w, stride, last, n, half, out = args
            rows = _rows_at(b, w, stride, half, last)
            with cgutils.for_range_slice(b, const(0), n, const(8), I64) as (at, _):
                offset = b.mul(at, const(size))
                found = transpose(b, [b.bitcast(simd.widen(b, kind, b.add(row, offset)), VI32) for row in rows])
                _store(b, found, out, at, half)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return pack


pack_fp32, pack_bf16 = make_pack("fp32"), make_pack("bf16")
