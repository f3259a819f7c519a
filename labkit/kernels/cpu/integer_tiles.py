# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Register tiles of an integer product: 16 rows of a panel, one a lane, meet a few rounded tokens.

    total[o] = fma(float(sum of a block), s[o, block] step[t, block], total[o])      exact sums, blocks in order
    total[o] = fma(m[o, block], sum of the block's activations, total[o])            where there are minima

Every tile computes just this, whatever the number of tokens, wherever the codes come from, and with whatever of the
processor's instructions (``integer_dots``; a tier's vectors take 8 rows, or all 16), so an output does not depend on
who is computed beside it. Sources of a unit of 8 inputs (``labkit.kernels.panel_layout``):

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

from labkit.kernels.cpu import amx_tile, simd, tiers
from labkit.kernels.cpu.integer_dots import add_bytes, add_pairs
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.memory import ROWS
from labkit.kernels.cpu.simd import F32, I8, I16, I32, I64, const, load

Parts = list[Callable[[], Any]]
LINE = 64


def _each(value: int, lanes: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(I16, 2 * lanes), [value] * (2 * lanes))


def _pairs(b: Any, at: Any, lanes: int) -> Any:
    """A word of so many rows, as pairs of int16."""
    return load(b, at, ir.VectorType(I16, 2 * lanes))


def nibbles(b: Any, at: Any, lanes: int) -> Parts:
    """Four vectors of pairs: inputs (0, 2), (1, 3), (4, 6), (5, 7) of each row, each made where it is used."""
    v, low = _pairs(b, at, lanes), _each(15, lanes)
    return [
        lambda: b.and_(v, low),
        lambda: b.and_(b.lshr(v, _each(8, lanes)), low),
        lambda: b.and_(b.lshr(v, _each(4, lanes)), low),
        lambda: b.lshr(v, _each(12, lanes)),
    ]


def signed_bytes(b: Any, at: Any, lanes: int) -> Parts:
    def part(j: int) -> Any:
        v = _pairs(b, b.add(at, const(LINE * (j // 2))), lanes)
        return b.ashr(v if j % 2 else b.shl(v, _each(8, lanes)), _each(8, lanes))

    return [partial(part, j) for j in range(4)]


def words(b: Any, at: Any, lanes: int) -> Parts:
    return [partial(_pairs, b, b.add(at, const(LINE * j)), lanes) for j in range(4)]


def unsigned_bytes(b: Any, at: Any, lanes: int) -> Parts:
    return [partial(load, b, b.add(at, const(LINE * j)), ir.VectorType(I8, 4 * lanes)) for j in (0, 1)]


Source = Callable[[Any, Any, int], Parts]
"""Address of a unit, or of some of its rows, and how many rows: what meets the activations, in turn."""
UNIT_BYTES: dict[Source, int] = {nibbles: LINE, signed_bytes: 2 * LINE, words: 4 * LINE, unsigned_bytes: 2 * LINE}

OFTEN = (nibbles, words)
"""Whose weights mostly have minima: those that have none have zeros."""


def make_tile(tokens: int, source: Source, tier: tiers.Tier) -> Any:
    """``tokens`` records, ``x_stride`` bytes apart, meet ``n_blocks`` blocks of ``block_units`` units.

    A block's scales are row block >> ``group_shift`` of ``scales``, its minima likewise (0, of bytes: none), its step
    is number block >> ``step_shift``. ``fresh``: out is written, else the sums go on from what is there. Each block
    asks for ``n_ask`` lines of memory from ``ask`` on."""
    of_bytes, lanes = source is unsigned_bytes, tier.lanes
    number, number_each = (I8, 4) if of_bytes else (I16, 2)
    sums_kind, float_kind = ir.VectorType(I32, lanes), ir.VectorType(F32, lanes)
    rows = range(0, 4 * ROWS, 4 * lanes)  # where a vector's rows begin, in bytes of a line
    dot = add_bytes if of_bytes else add_pairs

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
            outs = [[b.add(b.add(out, b.mul(out_stride, const(t))), const(row)) for row in rows] for t in each]
            totals = [simd.accumulators(b, len(rows), lanes) for _ in each]
            with b.if_then(b.icmp_signed("==", fresh, const(0))):
                for slots, places in zip(totals, outs, strict=True):
                    for slot, place in zip(slots, places, strict=True):
                        b.store(load(b, place, float_kind), slot)
            inner = [[cgutils.alloca_once(b, sums_kind) for _ in rows] for _ in each]

            def lift(t: int, group: Any, cell: Any) -> None:
                weight = simd.splat(b, load(b, b.add(b.add(sums, apart[t]), cell), F32), lanes)
                for row, slot in zip(rows, totals[t], strict=True):
                    low = load(b, b.add(b.add(minima, group), const(row)), float_kind)
                    b.store(simd.fma(b, low, weight, b.load(slot)), slot)

            with cgutils.for_range(b, n_blocks, intp=I64) as loop:
                block, cell = loop.index, b.mul(loop.index, const(4))
                simd.prefetch_lines(b, ask, block, n_ask)
                for t in each:
                    start = ir.Constant(sums_kind, [0] * lanes)
                    if of_bytes:
                        start = simd.splat(b, load(b, b.add(b.add(sums, apart[t]), cell), I32), lanes)
                    for slot in inner[t]:
                        b.store(start, slot)
                first = b.mul(block, block_units)
                with cgutils.for_range_slice(b, first, b.add(first, block_units), const(1), I64) as (unit, _):
                    at = b.add(panel, b.mul(unit, const(UNIT_BYTES[source])))
                    here = b.add(x, b.mul(unit, const(8 if of_bytes else 16)))
                    weights = [source(b, b.add(at, const(row)), lanes) for row in rows]
                    for j in range(len(weights[0])):
                        now = [parts[j]() for parts in weights]
                        for t in each:
                            some = load(b, b.add(b.add(here, apart[t]), const(4 * j)), I32)
                            wide = b.bitcast(simd.splat(b, some, lanes), ir.VectorType(number, number_each * lanes))
                            for weight, slot in zip(now, inner[t], strict=True):
                                b.store(dot(b, tier, b.load(slot), weight, wide), slot)
                group = b.mul(b.lshr(block, group_shift), const(LINE))
                scale = [load(b, b.add(b.add(scales, group), const(row)), float_kind) for row in rows]
                column = b.mul(b.lshr(block, step_shift), const(4))
                for t in each:
                    step = simd.splat(b, load(b, b.add(b.add(steps, apart[t]), column), F32), lanes)
                    for slot, exact, grid in zip(totals[t], inner[t], scale, strict=True):
                        whole = b.sitofp(b.load(exact), float_kind)
                        b.store(simd.fma(b, whole, b.fmul(step, grid), b.load(slot)), slot)
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


TIER = tiers.in_use()
MOST = 8 if TIER.lanes == ROWS else 4
"""Tokens of the widest tile: its sums and what they are made of fill the registers."""
MOST_BYTES = amx_tile.TOKENS if TIER.has_tiles else MOST
"""The same where tokens are bytes."""


def _named_after(source: Source) -> Callable[[Callable[..., Any]], Any]:
    """``jit`` under a name of the source's own. Functions are compiled in several processes and linked by name: two
    that share one would stand in for each other."""

    def compiled(function: Callable[..., Any]) -> Any:
        function.__name__ = function.__qualname__ = f"{function.__name__}_{source.__name__}"
        return jit(function)

    return compiled


def make_ladder(source: Source, tier: tiers.Tier) -> Any:
    """A tile of MOST (of bytes MOST_BYTES), 4, 3, 2 or 1 tokens, the most that there are; returns how many. given: a
    tile's arguments."""
    four, three, two, one = (make_tile(n, source, tier) for n in (4, 3, 2, 1))

    @_named_after(source)
    def narrow(n_tokens, given):
        if n_tokens >= 4:
            four(*given)
            return 4
        if n_tokens == 3:  # in turn, two and one would take the weights apart twice
            three(*given)
            return 3
        if n_tokens == 2:
            two(*given)
            return 2
        one(*given)
        return 1

    if tier.lanes < ROWS:
        return narrow
    eight = make_tile(8, source, tier)

    @_named_after(source)
    def wide(n_tokens, given):
        if n_tokens >= 8:
            eight(*given)
            return 8
        return narrow(n_tokens, given)

    if not tier.has_tiles or source is not unsigned_bytes:
        return wide
    sixteen = amx_tile.of_unsigned

    @_named_after(source)
    def widest(n_tokens, given):
        if n_tokens >= MOST_BYTES:
            sixteen(*given)
            return MOST_BYTES
        return wide(n_tokens, given)

    return widest


of_nibbles, of_signed, of_words, of_unsigned = (
    make_ladder(source, TIER) for source in (nibbles, signed_bytes, words, unsigned_bytes)
)
NIBBLES, BYTES, WORDS, UNSIGNED = range(4)


@jit
def tile(source, n_tokens, given):
    """The tile of a source; returns how many tokens it took."""
    if source == NIBBLES:
        return of_nibbles(n_tokens, given)
    if source == BYTES:
        return of_signed(n_tokens, given)
    if source == WORDS:
        return of_words(n_tokens, given)
    return of_unsigned(n_tokens, given)
