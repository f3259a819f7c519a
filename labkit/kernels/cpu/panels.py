# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Sixteen stored rows to a panel that ``tiles`` multiplies: word k of all rows beside each other.

    pack_fp32, pack_bf16     rows to float32                               one number a word
    pack_int8                rows of int8 to int16                         two a word
    pack_bytes               rows of int8 + WEIGHT_OFFSET, unsigned        four a word
    pack_int4                packed int4 to int16, the zero points off     two a word, blocks of 64

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
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.memory import ROWS, WORD
from labkit.kernels.cpu.simd import F32, I8, I16, I32, I64, V16I8, V16I16, V32I8, VI32, const, load

V4I32, V4F32 = ir.VectorType(I32, 4), ir.VectorType(F32, 4)
INT4_ROWS = 4
"""Rows that lie together in packed int4."""


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
    """Eight rows of ``n`` numbers from address w on; fp32 and bf16: n a multiple of 8; int8: of 16; bytes: of 32."""
    size, numbers = {"fp32": (4, 8), "bf16": (2, 8), "int8": (1, 16), "bytes": (1, 32)}[kind]

    def words(b: Any, address: Any) -> Any:
        if kind == "int8":
            return b.bitcast(b.sext(load(b, address, V16I8), V16I16), VI32)
        if kind == "bytes":
            # sign bits turned round: WEIGHT_OFFSET more, without sign
            return b.xor(b.bitcast(load(b, address, V32I8), VI32), ir.Constant(VI32, [0x80808080] * 8))
        return b.bitcast(simd.widen(b, kind, address), VI32)

    @intrinsic
    def pack(typingctx: Any, w: Any, stride: Any, last: Any, n: Any, half: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            w, stride, last, n, half, out = args
            rows = _rows_at(b, w, stride, half, last)
            with cgutils.for_range_slice(b, const(0), n, const(numbers), I64) as (at, turn):
                offset = b.mul(at, const(size))
                found = transpose(b, [words(b, b.add(row, offset)) for row in rows])
                _store(b, found, out, b.mul(turn, const(8)), half)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return pack


pack_fp32, pack_bf16, pack_int8, pack_bytes = (make_pack(kind) for kind in ("fp32", "bf16", "int8", "bytes"))


@intrinsic
def pack_int4_half(
    typingctx: Any, w: Any, stride: Any, last: Any, n_blocks: Any, zeros: Any, zeros_stride: Any, first: Any,
    group: Any, half: Any, out: Any,
) -> Any:  # fmt: skip
    """Eight rows, two of the packed panels of four that lie ``stride`` bytes apart, their blocks [first, first + n).

    zeros (panels, G, 4) uint8, panels ``zeros_stride`` bytes apart; 0: all are 8."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        w, stride, last, n_blocks, zeros, zeros_stride, first, group, half, out = args
        has_zeros = b.icmp_unsigned("!=", zeros, const(0))
        fours = []
        for i in (0, 1):
            four = b.add(b.mul(half, const(2)), const(i))
            fours.append(b.select(b.icmp_signed("<", four, last), four, last))
        with cgutils.for_range(b, n_blocks, intp=I64) as loop:
            block = b.add(first, loop.index)
            words = []
            for four in fours:
                at = b.add(b.add(w, b.mul(four, stride)), b.mul(block, const(32 * INT4_ROWS)))
                words += [load(b, b.add(at, const(32 * r)), V16I16) for r in range(INT4_ROWS)]
            for part in (0, 1):  # a group covers at least half a block
                column = b.udiv(b.add(b.mul(block, const(64)), const(32 * part)), group)
                offs = []
                for four in fours:
                    cell = b.add(b.add(zeros, b.mul(four, zeros_stride)), b.mul(column, const(INT4_ROWS)))
                    offs += _zeros(b, has_zeros, cell)
                for j in (2 * part, 2 * part + 1):
                    rows = []
                    for word, off in zip(words, offs, strict=True):
                        q = b.and_(b.lshr(word, ir.Constant(V16I16, [4 * j] * 16)), ir.Constant(V16I16, [15] * 16))
                        rows.append(b.bitcast(b.sub(q, simd.splat(b, off, 16)), VI32))
                    at = b.add(b.mul(loop.index, const(32)), const(8 * j))
                    _store(b, transpose(b, rows), out, at, half)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), codegen


def _zeros(b: Any, has_zeros: Any, address: Any) -> list[Any]:
    """Four rows' zero points as int16; 8 for the symmetric grid, which stores none."""
    before = b.block
    with b.if_then(has_zeros):
        stored = load(b, address, ir.VectorType(I8, INT4_ROWS))
        inside = b.block
    phi = b.phi(ir.VectorType(I8, INT4_ROWS))
    phi.add_incoming(ir.Constant(ir.VectorType(I8, INT4_ROWS), [8] * INT4_ROWS), before)
    phi.add_incoming(stored, inside)
    return [b.zext(b.extract_element(phi, ir.Constant(I32, r)), I16) for r in range(INT4_ROWS)]


@intrinsic
def four_scales(typingctx: Any, halves: Any, out: Any) -> Any:
    """Four non-negative float16 to float32: exact, subnormals too."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        bits = b.zext(load(b, args[0], ir.VectorType(I16, 4)), V4I32)
        bits = b.bitcast(b.shl(bits, ir.Constant(V4I32, [13] * 4)), V4F32)
        simd.store(b, b.fmul(bits, ir.Constant(V4F32, [2.0**112] * 4)), args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@jit
def pack_int4(w, stride, last, n_blocks, zeros, zeros_stride, first, group, out):
    """``n_blocks`` blocks of 64 of the 16 rows at w, four to a packed panel; ``last``: of those the last there is."""
    for half in range(2):
        pack_int4_half(w, stride, last, n_blocks, zeros, zeros_stride, first, group, half, out)


@jit
def spread_scales(scales, n_groups, last, first, n_blocks, size, group, out):
    """(n_blocks, 16) float32: each row's scale in each block of ``size`` weights from weight ``first`` on.

    scales: address of the float16 of the 16 rows, (panels of four, n_groups, 4)."""
    for block in range(n_blocks):
        column = (first + block * size) // group
        for four in range(ROWS // INT4_ROWS):
            cell = (min(four, last) * n_groups + column) * INT4_ROWS
            four_scales(scales + 2 * cell, out + WORD * block + 4 * INT4_ROWS * four)
