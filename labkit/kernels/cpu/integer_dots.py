"""The two products that all integer tiles are made of, in the instructions of each tier.

    add_pairs   total + x[2i] y[2i] + x[2i+1] y[2i+1]                    int16, any
    add_bytes   total + sum of unsigned[4i+j] signed[4i+j], j = 0 ... 3  bytes, signed ones within 63 of 0

Both are exact in int32, and so the same on every tier: where AVX2's ``vpmaddubsw`` adds two products in 16 bits and
would saturate, 2 x 255 x 63 still fits; vpdpbusd and usdot take the unsigned side first; sdot, which has no unsigned
side, takes it less 128, and 128 times the signed one is added again. Vectors wider than a tier's are cut.

Products of bf16 by AVX-512 BF16 are not among them: the compiled step meets bf16 weights with float32 activations, and
vdpbf16ps would round those to 8 bits of mantissa.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from labkit.kernels.cpu.tiers import Tier

I8, I16, I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
Dot = Callable[[Any, Any, Any, Any], Any]


def add_pairs(b: Any, tier: Tier, total: Any, x: Any, y: Any) -> Any:
    """total (n int32) + products of pairs of int16, x and y (2n int16)."""
    return _in_pieces(b, total, x, y, PAIRS.get(tier.name, {}), b.sext)


def add_bytes(b: Any, tier: Tier, total: Any, unsigned: Any, signed: Any) -> Any:
    """total (n int32) + products of fours of bytes, unsigned and signed (4n int8)."""
    return _in_pieces(b, total, unsigned, signed, BYTES.get(tier.name, {}), b.zext)


def _in_pieces(b: Any, total: Any, x: Any, y: Any, native: dict[int, Dot], widen: Any) -> Any:
    """By the tier's widest form that the vector is a whole number of, else in plain vectors."""
    lanes, each = total.type.count, x.type.count // total.type.count
    width = max((n for n in native if lanes % n == 0), default=0)
    if not width:
        return _plain(b, total, widen(x, ir.VectorType(I32, lanes * each)), y, each)
    if width == lanes:
        return native[width](b, total, x, y)
    pieces = []
    for at in range(0, lanes, width):
        parts = _part(b, total, at, width), *(_part(b, v, at * each, width * each) for v in (x, y))
        pieces.append(native[width](b, *parts))
    while len(pieces) > 1:
        pieces = [_joined(b, low, high) for low, high in zip(pieces[::2], pieces[1::2], strict=True)]
    return pieces[0]


def _part(b: Any, v: Any, first: int, n: int) -> Any:
    return _pick(b, v, v, list(range(first, first + n)))


def _joined(b: Any, low: Any, high: Any) -> Any:
    return _pick(b, low, high, list(range(2 * low.type.count)))


def _pick(b: Any, x: Any, y: Any, order: list[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(order)), order))


def _call(b: Any, name: str, result: Any, *args: Any) -> Any:
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(function, args)


def _same(kind: Any, lanes: int, value: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)


def _plain(b: Any, total: Any, x: Any, y: Any, n: int) -> Any:
    """x is int32 already. LLVM finds what it can."""
    product = b.mul(x, b.sext(y, x.type))
    for start in range(n):
        total = b.add(total, _pick(b, product, product, list(range(start, x.type.count, n))))
    return total


# --- x86 ----------------------------------------------------------------------------------------------------------


def _in_turn(b: Any, v: Any) -> Any:
    """v, about which the compiler knows nothing: sums stay in the order that they are written in. Left alone, LLVM adds
    up all products of a turn first, runs out of registers, and moves the sums through memory."""
    register = "x" if v.type.count == 8 else "v"
    return b.call(ir.InlineAsm(ir.FunctionType(v.type, [v.type]), "", f"={register},0"), [v])


def _madd(b: Any, x: Any, y: Any) -> Any:
    return _call(b, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), x, y)


def _avx2_pairs(b: Any, total: Any, x: Any, y: Any) -> Any:
    return _in_turn(b, b.add(total, _madd(b, x, y)))


def _avx2_bytes(b: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    pairs = _call(b, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), unsigned, signed)
    return _in_turn(b, b.add(total, _madd(b, pairs, _same(I16, 16, 1))))


def _vnni_bytes(bits: int) -> Dot:
    """LLVM's older form, whose bytes come as int32: newer versions take it too."""

    def dot(b: Any, total: Any, unsigned: Any, signed: Any) -> Any:
        unsigned, signed = b.bitcast(unsigned, total.type), b.bitcast(signed, total.type)
        return _in_turn(b, _call(b, f"llvm.x86.avx512.vpdpbusd.{bits}", total.type, total, unsigned, signed))

    return dot


def _vnni_pairs(written: str, register: str) -> Dot:
    """As assembly: of LLVM's own form most became a product and an addition again."""

    def dot(b: Any, total: Any, x: Any, y: Any) -> Any:
        kind = ir.FunctionType(total.type, [total.type, x.type, y.type])
        return b.call(
            ir.InlineAsm(kind, f"{written} $3, $2, $0", f"={register},0,{register},{register}"), [total, x, y]
        )

    return dot


_EVEX, _VEX = ("vpdpwssd", "v"), ("{vex} vpdpwssd", "x")


# --- aarch64 ------------------------------------------------------------------------------------------------------


def _usdot(b: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    return _call(b, "llvm.aarch64.neon.usdot.v4i32.v16i8", total.type, total, unsigned, signed)


def _sdot(b: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    name, half = "llvm.aarch64.neon.sdot.v4i32.v16i8", _same(I8, 16, 64)
    total = _call(b, name, total.type, total, b.xor(unsigned, _same(I8, 16, -128)), signed)
    for _ in range(2):
        total = _call(b, name, total.type, total, half, signed)
    return total


PAIRS: dict[str, dict[int, Dot]] = {
    "avx512vnni": {16: _vnni_pairs(*_EVEX), 8: _vnni_pairs(*_EVEX)},
    "avxvnni": {8: _vnni_pairs(*_VEX)},
    "avx2": {8: _avx2_pairs},
}
BYTES: dict[str, dict[int, Dot]] = {
    "avx512vnni": {16: _vnni_bytes(512), 8: _vnni_bytes(256)},
    "avxvnni": {8: _vnni_bytes(256)},
    "avx2": {8: _avx2_bytes},
    "i8mm": {4: _usdot},
    "dotprod": {4: _sdot},
}
"""A tier's own forms by the lanes that they take; without one it has plain vectors."""
PAIRS["amx"], BYTES["amx"] = PAIRS["avx512vnni"], BYTES["avx512vnni"]  # its tiles are for sixteen tokens (``amx_tile``)
