"""The inner loops of attention over a stored cache, in vectors of 8 lanes (see ``labkit.kernels.cpu.simd``).

A key-value head serves R query heads, so a stored number is widened to float32 once and used R times from a register.

    score_rows      s[r,t] = q[r] . k[t]             keys token by token (fp32, bf16)
    score_channels  s[r,t] = sum_d q[r,d] k[d,t]     keys channel by channel (int8, int4): no sum across lanes
    mix             acc[r] += sum_t p[r,t] v[t]      values token by token (all kinds)
    fold            y[r] = x[r] * scale and x[r] . zero: the quantisation grid leaves the inner loop

With K = scale_d code + zero_d, q . K = (q * scale) . code + q . zero: D products a block instead of one a number.

int4: 16 numbers are 8 bytes; the low nibbles are the first of two runs of 8, the high nibbles the second.
Addresses are int64, strides in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as _intrinsic

from labkit.kernels.cpu import simd
from labkit.kernels.cpu.simd import F32, I64, VF32, VI8, VI32, const, load
from labkit.kernels.cpu.stored_spec import KINDS, MAX_ROWS

intrinsic: Any = _intrinsic
TOKENS = {1: 8, 2: 4, 3: 4, 4: 2}
"""Tokens that ``score_rows`` takes at once, by R, so that each query vector loaded serves several."""


def _switch(b: Any, value: Any, cases: dict[int, Callable[[], None]]) -> None:
    """Run the case that ``value`` names; no case runs when none matches."""
    for key, emit in cases.items():
        with b.if_then(b.icmp_signed("==", value, const(key))):
            emit()


def _widen_pair(b: Any, kind: str, address: Any) -> tuple[Any, Any]:
    """The 16 numbers at ``address`` as two vectors."""
    if kind != "int4":
        second = b.add(address, const(8 * simd.ITEMSIZE[kind]))
        return simd.widen(b, kind, address), simd.widen(b, kind, second)
    codes = b.zext(load(b, address, VI8), VI32)
    low, high = b.and_(codes, simd.isplat(15)), b.lshr(codes, simd.isplat(4))
    return b.sitofp(low, VF32), b.sitofp(high, VF32)


def _at(b: Any, base: Any, idx: Any, stride: Any) -> Any:
    return b.add(base, b.mul(idx, stride))


def _scalar(b: Any, address: Any) -> Any:
    return simd.splat(b, load(b, address, F32, align=4))


def _score_rows(b: Any, kind: str, rows: int, args: list[Any]) -> None:
    q, q_stride, n_dims, k, k_stride, n_tokens, s, s_stride = args
    tokens = TOKENS[rows]
    with cgutils.for_range_slice(b, const(0), n_tokens, const(tokens), I64) as (first, _):
        sums = simd.accumulators(b, rows * tokens)
        base = _at(b, k, first, k_stride)
        with cgutils.for_range_slice(b, const(0), n_dims, const(8), I64) as (dim, _):
            offset = b.mul(dim, const(simd.ITEMSIZE[kind]))
            keys = [simd.widen(b, kind, b.add(_at(b, base, const(t), k_stride), offset)) for t in range(tokens)]
            for r in range(rows):
                qv = load(b, b.add(_at(b, q, const(r), q_stride), b.mul(dim, const(4))), VF32)
                for t in range(tokens):
                    slot = sums[r * tokens + t]
                    b.store(simd.fma(b, qv, keys[t], b.load(slot)), slot)
        for r in range(rows):
            home = _at(b, _at(b, s, const(r), s_stride), first, const(4))
            ours = [b.load(slot) for slot in sums[r * tokens : (r + 1) * tokens]]
            if tokens == 2:  # two vectors are added up as four, each twice: no dearer than each alone
                pair = ir.Constant(ir.VectorType(simd.I32, 2), [0, 1])
                four = simd.four_totals(b, ours * 2)
                simd.store(b, b.shuffle_vector(four, four, pair), home)
                continue
            for t in range(0, tokens, 4):
                simd.store(b, simd.four_totals(b, ours[t : t + 4]), b.add(home, const(4 * t)))


def _score_channels(b: Any, kind: str, rows: int, args: list[Any]) -> None:
    q, q_stride, n_dims, k, k_stride, n_tokens, s, s_stride = args
    packed = kind == "int4"
    n, step = (b.udiv(n_tokens, const(2)), 8) if packed else (n_tokens, 16)
    gap = b.mul(n, const(4)) if packed else const(32)
    with cgutils.for_range_slice(b, const(0), n, const(step), I64) as (first, _):
        sums = simd.accumulators(b, 2 * rows)
        base = b.add(k, first)
        with cgutils.for_range_slice(b, const(0), n_dims, const(1), I64) as (dim, _):
            pair = _widen_pair(b, kind, _at(b, base, dim, k_stride))
            for r in range(rows):
                qv = _scalar(b, b.add(_at(b, q, const(r), q_stride), b.mul(dim, const(4))))
                for half in range(2):
                    slot = sums[2 * r + half]
                    b.store(simd.fma(b, qv, pair[half], b.load(slot)), slot)
        for r in range(rows):
            home = _at(b, _at(b, s, const(r), s_stride), first, const(4))
            simd.store(b, b.load(sums[2 * r]), home)
            simd.store(b, b.load(sums[2 * r + 1]), b.add(home, gap))


def _mix(b: Any, kind: str, rows: int, args: list[Any]) -> None:
    v, v_stride, n_tokens, p, p_stride, p_grid, grid_dims, n_dims, acc, acc_stride = args
    packed = kind == "int4"
    n, step, size = (b.udiv(n_dims, const(2)), 8, 1) if packed else (n_dims, 16, simd.ITEMSIZE[kind])
    with cgutils.for_range_slice(b, const(0), n, const(step), I64) as (dim, _):
        dims = (dim, b.add(dim, n if packed else const(8)))
        weights = [_at(b, p, b.udiv(d, grid_dims), p_grid) for d in dims] if kind in ("int8", "int4") else [p, p]
        slots = simd.accumulators(b, 2 * rows)
        homes = [_at(b, _at(b, acc, const(r), acc_stride), d, const(4)) for r in range(rows) for d in dims]
        for slot, home in zip(slots, homes, strict=True):
            b.store(load(b, home, VF32), slot)
        base = _at(b, v, dim, const(size))
        with cgutils.for_range_slice(b, const(0), n_tokens, const(1), I64) as (t, _):
            pair = _widen_pair(b, kind, _at(b, base, t, v_stride))
            for r in range(rows):
                offset = b.add(b.mul(t, const(4)), b.mul(p_stride, const(r)))
                low = _scalar(b, b.add(weights[0], offset))
                high = _scalar(b, b.add(weights[1], offset)) if packed else low
                for half, weight in enumerate((low, high)):
                    slot = slots[2 * r + half]
                    b.store(simd.fma(b, weight, pair[half], b.load(slot)), slot)
        for slot, home in zip(slots, homes, strict=True):
            simd.store(b, b.load(slot), home)


def _by_kind(b: Any, args: Any, kinds: tuple[str, ...], emit: Callable[..., None]) -> None:
    kind, rows, *rest = args
    for name in kinds:
        cases = {n: (lambda name=name, n=n: emit(b, name, n, rest)) for n in range(1, MAX_ROWS + 1)}
        _switch(b, kind, {KINDS[name]: lambda cases=cases: _switch(b, rows, cases)})


def _signature(n_args: int) -> Any:
    return types.void(*[types.int64] * n_args)


@intrinsic
def score_rows(typingctx, kind, rows, q, q_stride, n_dims, k, k_stride, n_tokens, s, s_stride):  # type: ignore[no-untyped-def]
    """Scores of n_tokens (a multiple of 8) whose keys lie token by token; n_dims a multiple of 8."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _by_kind(b, args, ("fp32", "bf16"), _score_rows)
        return context.get_dummy_value()

    return _signature(10), codegen


@intrinsic
def score_channels(typingctx, kind, rows, q, q_stride, n_dims, k, k_stride, n_tokens, s, s_stride):  # type: ignore[no-untyped-def]
    """Scores of a block of n_tokens (a multiple of 16) whose keys lie channel by channel."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _by_kind(b, args, ("int8", "int4"), _score_channels)
        return context.get_dummy_value()

    return _signature(10), codegen


@intrinsic
def mix(typingctx, kind, rows, v, v_stride, n_tokens, p, p_stride, p_grid, grid_dims, n_dims, acc, acc_stride):  # type: ignore[no-untyped-def]
    """acc[r] += sum_t p[r,t] v[t]; n_dims a multiple of 16. int8 and int4: every run of ``grid_dims`` dims has weights
    of its own (p times its scale), ``p_grid`` bytes apart."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _by_kind(b, args, tuple(KINDS), _mix)
        return context.get_dummy_value()

    return _signature(12), codegen


@intrinsic
def fold(typingctx, rows, x, x_stride, n, scale, zero, y, y_stride, dots):  # type: ignore[no-untyped-def]
    """y[r] = x[r] * scale; dots[r] = x[r] . zero; scale and zero are n numbers in bf16, n a multiple of 8."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        rows, x, x_stride, n, scale, zero, y, y_stride, dots = args
        with cgutils.for_range_slice(b, const(0), rows, const(1), I64) as (r, _):
            total = simd.accumulators(b, 1)[0]
            b.store(simd.fsplat(0.0), total)
            with cgutils.for_range_slice(b, const(0), n, const(8), I64) as (at, _):
                wide, narrow = b.mul(at, const(4)), b.mul(at, const(2))
                xv = load(b, b.add(_at(b, x, r, x_stride), wide), VF32)
                scaled = b.fmul(xv, simd.widen(b, "bf16", b.add(scale, narrow)))
                simd.store(b, scaled, b.add(_at(b, y, r, y_stride), wide))
                b.store(simd.fma(b, xv, simd.widen(b, "bf16", b.add(zero, narrow)), b.load(total)), total)
            simd.store(b, simd.total(b, b.load(total)), _at(b, dots, r, const(4)))
        return context.get_dummy_value()

    return _signature(9), codegen


@intrinsic
def largest(typingctx, s, n):  # type: ignore[no-untyped-def]
    """max s[0 ... n-1], n a multiple of 8."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        s, n = args
        best = simd.accumulators(b, 1)[0]
        b.store(load(b, s, VF32), best)
        with cgutils.for_range_slice(b, const(8), n, const(8), I64) as (at, _):
            v = load(b, b.add(s, b.mul(at, const(4))), VF32)
            b.store(simd.call(b, "llvm.maxnum.v8f32", VF32, v, b.load(best)), best)
        lanes = [b.extract_element(b.load(best), ir.Constant(ir.IntType(32), i)) for i in range(simd.LANES)]
        while len(lanes) > 1:
            lanes = [simd.call(b, "llvm.maxnum.f32", F32, *lanes[i : i + 2]) for i in range(0, len(lanes), 2)]
        return lanes[0]

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def call_stretch(typingctx, function, spec, table, seq, group, rows, q, lo, hi, blocked, state, softcap):  # type: ignore[no-untyped-def]
    """Call compiled code at an address. Unlike a call by name it is not compiled again into each caller."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [a.type for a in args[1:]])
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11, types.float32), codegen
