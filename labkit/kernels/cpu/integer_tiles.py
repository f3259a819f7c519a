# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Register tiles of an integer product: 16 rows of a panel, one a lane, meet a few rounded tokens.

    total[o] = fma(float(sum of a block), s[o, block] step[t, block], total[o])      exact sums, blocks in order
    total[o] = fma(m[o, block], sum of the block's activations, total[o])            where there are minima

Every tile computes just this, whatever the number of tokens and wherever the codes come from, so an output does not
depend on who is computed beside it. Sources of a unit of 8 inputs (``labkit.kernels.panel_layout``):

    nibbles, bytes   the panel as stored: a few tokens pass while it comes from memory
    words            16-bit numbers that ``expand`` made of the panel: many tokens pass it
    unsigned         bytes + 128, met by bytes: W8A8

A token's record (``rounding.round_token``): its codes, its steps, and for each block the sum of its activations; for
``unsigned`` the exact -128 times the sum of its codes, which the block's sum starts from.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from labkit.kernels.cpu import simd
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.simd import F32, I32, I64, V16I16, V32I8, VF32, VI32, const, load

HALVES = (0, 1)
Parts = list[Callable[[], Any]]
LINE = 64


def _each(value: int) -> ir.Constant:
    return ir.Constant(V16I16, [value] * 16)


def nibbles(b: Any, at: Any, half: int) -> Parts:
    """Four vectors of pairs: inputs (0, 2), (1, 3), (4, 6), (5, 7) of eight rows, each made where it is used."""
    v = load(b, b.add(at, const(32 * half)), V16I16)
    return [
        lambda: b.and_(v, _each(15)),
        lambda: b.and_(b.lshr(v, _each(8)), _each(15)),
        lambda: b.and_(b.lshr(v, _each(4)), _each(15)),
        lambda: b.lshr(v, _each(12)),
    ]


def signed_bytes(b: Any, at: Any, half: int) -> Parts:
    def part(j: int) -> Any:
        v = load(b, b.add(at, const(LINE * (j // 2) + 32 * half)), V16I16)
        return b.ashr(v if j % 2 else b.shl(v, _each(8)), _each(8))

    return [partial(part, j) for j in range(4)]


def words(b: Any, at: Any, half: int) -> Parts:
    return [partial(load, b, b.add(at, const(LINE * j + 32 * half)), V16I16) for j in range(4)]


def unsigned_bytes(b: Any, at: Any, half: int) -> Parts:
    return [partial(load, b, b.add(at, const(LINE * j + 32 * half)), V32I8) for j in (0, 1)]


Source = Callable[[Any, Any, int], Parts]
UNIT_BYTES: dict[Source, int] = {nibbles: LINE, signed_bytes: 2 * LINE, words: 4 * LINE, unsigned_bytes: 2 * LINE}

OFTEN = (nibbles, words)
"""Whose weights mostly have minima: those that have none have zeros."""


def make_tile(tokens: int, source: Source) -> Any:
    """``tokens`` records, ``x_stride`` bytes apart, meet ``n_blocks`` blocks of ``block_units`` units.

    A block's scales are row block >> ``group_shift`` of ``scales``, its minima likewise (0, of bytes: none), its step
    is number block >> ``step_shift``. ``fresh``: out is written, else the sums go on from what is there. Each block
    asks for ``n_ask`` lines of memory from ``ask`` on."""
    of_bytes = source is unsigned_bytes

    @intrinsic
    def tile(
        typingctx: Any, panel: Any, n_blocks: Any, block_units: Any, x: Any, x_stride: Any, steps: Any, sums: Any,
        step_shift: Any, scales: Any, minima: Any, group_shift: Any, out: Any, out_stride: Any, fresh: Any, ask: Any,
        n_ask: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            panel, n_blocks, block_units, x, x_stride, steps, sums, step_shift = args[:8]
            scales, minima, group_shift, out, out_stride, fresh, ask, n_ask = args[8:]
            each = range(tokens)
            apart = [b.mul(x_stride, const(t)) for t in each]
            outs = [[b.add(b.add(out, b.mul(out_stride, const(t))), const(32 * v)) for v in HALVES] for t in each]
            totals = [simd.accumulators(b, 2) for _ in each]
            with b.if_then(b.icmp_signed("==", fresh, const(0))):
                for slots, places in zip(totals, outs, strict=True):
                    for slot, place in zip(slots, places, strict=True):
                        b.store(load(b, place, VF32), slot)
            inner = [[cgutils.alloca_once(b, VI32) for _ in HALVES] for _ in each]

            def lift(t: int, group: Any, cell: Any) -> None:
                weight = simd.splat(b, load(b, b.add(b.add(sums, apart[t]), cell), F32))
                for v in HALVES:
                    low = load(b, b.add(b.add(minima, group), const(32 * v)), VF32)
                    b.store(simd.fma(b, low, weight, b.load(totals[t][v])), totals[t][v])

            with cgutils.for_range(b, n_blocks, intp=I64) as loop:
                block, cell = loop.index, b.mul(loop.index, const(4))
                lines = b.add(ask, b.mul(b.mul(block, n_ask), const(LINE)))
                with cgutils.for_range(b, n_ask, intp=I64) as asking:
                    simd.prefetch(b, b.add(lines, b.mul(asking.index, const(LINE))))
                for t in each:
                    start = ir.Constant(VI32, [0] * 8)
                    if of_bytes:
                        start = simd.splat(b, load(b, b.add(b.add(sums, apart[t]), cell), I32))
                    for slot in inner[t]:
                        b.store(start, slot)
                first = b.mul(block, block_units)
                with cgutils.for_range_slice(b, first, b.add(first, block_units), const(1), I64) as (unit, _):
                    at = b.add(panel, b.mul(unit, const(UNIT_BYTES[source])))
                    here = b.add(x, b.mul(unit, const(8 if of_bytes else 16)))
                    weights = [source(b, at, half) for half in HALVES]
                    for j in range(len(weights[0])):
                        now = [half[j]() for half in weights]
                        for t in each:
                            number = load(b, b.add(b.add(here, apart[t]), const(4 * j)), I32)
                            wide = b.bitcast(simd.splat(b, number), V32I8 if of_bytes else V16I16)
                            for weight, slot in zip(now, inner[t], strict=True):
                                if of_bytes:
                                    b.store(simd.in_turn(b, simd.dot_bytes(b, weight, wide, b.load(slot))), slot)
                                else:
                                    b.store(simd.in_turn(b, b.add(b.load(slot), simd.madd(b, weight, wide))), slot)
                group = b.mul(b.lshr(block, group_shift), const(LINE))
                scale = [load(b, b.add(b.add(scales, group), const(32 * v)), VF32) for v in HALVES]
                column = b.mul(b.lshr(block, step_shift), const(4))
                for t in each:
                    step = simd.splat(b, load(b, b.add(b.add(steps, apart[t]), column), F32))
                    for v in HALVES:
                        whole = b.sitofp(b.load(inner[t][v]), VF32)
                        b.store(simd.fma(b, whole, b.fmul(step, scale[v]), b.load(totals[t][v])), totals[t][v])
                    if source in OFTEN:
                        lift(t, group, cell)
                if source is signed_bytes:
                    with b.if_then(b.icmp_unsigned("!=", minima, const(0))):
                        for t in each:
                            lift(t, group, cell)
            for slots, places in zip(totals, outs, strict=True):
                for slot, place in zip(slots, places, strict=True):
                    simd.store(b, b.load(slot), place)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 16), codegen

    return tile


nibbles_4, nibbles_2, nibbles_1 = (make_tile(n, nibbles) for n in (4, 2, 1))
bytes_4, bytes_2, bytes_1 = (make_tile(n, signed_bytes) for n in (4, 2, 1))
words_4, words_2, words_1 = (make_tile(n, words) for n in (4, 2, 1))
unsigned_4, unsigned_2, unsigned_1 = (make_tile(n, unsigned_bytes) for n in (4, 2, 1))
NIBBLES, BYTES, WORDS, UNSIGNED = range(4)
MOST = 4
"""Tokens of the widest tile: its sums and what they are made of fill the registers."""


@jit
def tile(source, n_tokens, given):
    """A tile of 4, 2 or 1 tokens, the most that ``n_tokens`` allow; returns how many. given: its arguments."""
    if n_tokens >= 4:
        if source == NIBBLES:
            nibbles_4(*given)
        elif source == BYTES:
            bytes_4(*given)
        elif source == WORDS:
            words_4(*given)
        else:
            unsigned_4(*given)
        return 4
    if n_tokens >= 2:
        if source == NIBBLES:
            nibbles_2(*given)
        elif source == BYTES:
            bytes_2(*given)
        elif source == WORDS:
            words_2(*given)
        else:
            unsigned_2(*given)
        return 2
    if source == NIBBLES:
        nibbles_1(*given)
    elif source == BYTES:
        bytes_1(*given)
    elif source == WORDS:
        words_1(*given)
    else:
        unsigned_1(*given)
    return 1
