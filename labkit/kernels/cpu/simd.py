# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Vector instructions for numba: what plain numba cannot say, written as portable LLVM IR.

numba vectorises a float32 loop well and an unpack-and-multiply loop badly (4 G weights/s for int4). So the inner
loops are spelled out in vectors of 8 lanes that LLVM turns into AVX2, AVX-512 or NEON: no compiler is needed on the
user's machine, and nothing here names an instruction set (``integer_dots`` does). Memory is passed as addresses
(int64).

Every function is an ``@intrinsic``: a piece of IR that the compiled step inlines.
"""

from __future__ import annotations

from platform import machine
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from labkit.kernels.cpu import platform

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
LANES = 8
VI8, VI16, VI32, VF32 = (ir.VectorType(t, LANES) for t in (I8, I16, I32, F32))
V16I16 = ir.VectorType(I16, 16)
X86 = machine().lower() in ("x86_64", "amd64")


def const(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def load(b: Any, address: Any, type_: Any, align: int = 1) -> Any:
    return b.load(b.inttoptr(address, type_.as_pointer()), align=align)


def store(b: Any, value: Any, address: Any, align: int = 4) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=align)


def splat(b: Any, scalar: Any, lanes: int = LANES) -> Any:
    """One scalar in all lanes."""
    empty = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    one = b.insert_element(empty, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(one, empty, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def fsplat(value: float) -> ir.Constant:
    return ir.Constant(VF32, [value] * LANES)


def isplat(value: int) -> ir.Constant:
    return ir.Constant(VI32, [value] * LANES)


def call(b: Any, name: str, result: Any, *args: Any) -> Any:
    """Call an LLVM intrinsic by name."""
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(function, args)


def prefetch(b: Any, address: Any) -> None:
    """Ask for the cache line at ``address``, which may lie beyond the array: nothing is read."""
    where = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [where, I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0i8")
    read, keep, data = (ir.Constant(I32, value) for value in (0, 3, 1))
    b.call(function, [b.inttoptr(address, where), read, keep, data])


def prefetch_lines(b: Any, first: Any, turn: Any, n_lines: Any) -> None:
    """Ask for a turn's share of the memory from ``first`` on: ``n_lines`` cache lines of 64 bytes."""
    here = b.add(first, b.mul(b.mul(turn, n_lines), const(64)))
    with cgutils.for_range(b, n_lines, intp=I64) as loop:
        prefetch(b, b.add(here, b.mul(loop.index, const(64))))


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return call(b, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)


def total(b: Any, v: Any) -> Any:
    """The sum of the lanes: halves are added pairwise."""
    for half in (4, 2, 1):
        order = [(i + half) % LANES for i in range(LANES)]
        v = b.fadd(v, b.shuffle_vector(v, v, ir.Constant(VI32, order)))
    return b.extract_element(v, ir.Constant(I32, 0))


def four_totals(b: Any, vectors: list[Any]) -> Any:
    """The sums of the lanes of four vectors, as one of 4 lanes: a third of the work of four ``total``."""
    add = b.add if vectors[0].type == VI32 else b.fadd

    def pick(x: Any, y: Any, order: list[int]) -> Any:
        return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(order)), order))

    pairs = []
    for x, y in (vectors[:2], vectors[2:]):
        low, high = pick(x, y, [0, 1, 2, 3, 8, 9, 10, 11]), pick(x, y, [4, 5, 6, 7, 12, 13, 14, 15])
        pairs.append(add(low, high))
    quarters = add(pick(*pairs, [0, 1, 8, 9, 4, 5, 12, 13]), pick(*pairs, [2, 3, 10, 11, 6, 7, 14, 15]))
    return add(pick(quarters, quarters, [0, 4, 2, 6]), pick(quarters, quarters, [1, 5, 3, 7]))


def isum(b: Any, v: Any) -> Any:
    """The sum of 8 int32 lanes."""
    for half in (4, 2, 1):
        order = [(i + half) % LANES for i in range(LANES)]
        v = b.add(v, b.shuffle_vector(v, v, ir.Constant(VI32, order)))
    return b.extract_element(v, ir.Constant(I32, 0))


def largest(b: Any, v: Any) -> Any:
    """The largest lane."""
    for half in (4, 2, 1):
        order = [(i + half) % LANES for i in range(LANES)]
        v = call(b, "llvm.maxnum.v8f32", VF32, v, b.shuffle_vector(v, v, ir.Constant(VI32, order)))
    return b.extract_element(v, ir.Constant(I32, 0))


def larger(b: Any, x: Any, y: Any) -> Any:
    """The larger of x and y in each lane, y where x is NaN: one instruction, which maxnum is not."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


ROUNDS = 1.5 * 2**23
"""A float32 this large has no fraction: what is added to it comes out rounded to even, in its low bits."""


def exp(b: Any, x: Any) -> Any:
    """e^x in 8 lanes: 2^n times a polynomial on [-1/2, 1/2] (minimax, 7.5e-8); within 2 ulp, clamped to the normal
    range."""
    x = b.select(b.fcmp_ordered(">", x, fsplat(88.0)), fsplat(88.0), x)
    x = b.select(b.fcmp_ordered("<", x, fsplat(-87.0)), fsplat(-87.0), x)
    shifted = fma(b, x, fsplat(1.4426950408889634), fsplat(ROUNDS + 127))
    n = b.fsub(shifted, fsplat(ROUNDS + 127))
    r = fma(b, x, fsplat(1.4426950216293335), b.fneg(n))
    r = fma(b, x, fsplat(1.925963033500011e-08), r)
    p = polynomial(b, r, 0.0013276466634124517, 0.009675540961325169, 0.05550713464617729, 0.24022120237350464,
                   0.6931469440460205, 1.0)  # fmt: skip
    return b.fmul(p, b.bitcast(b.shl(b.bitcast(shifted, VI32), isplat(23)), VF32))


def polynomial(b: Any, x: Any, first: float, *rest: float) -> Any:
    """Coefficients from the highest power down."""
    p = fsplat(first)
    for coefficient in rest:
        p = fma(b, p, x, fsplat(coefficient))
    return p


def widen(b: Any, kind: str, address: Any) -> Any:
    """8 stored numbers at ``address`` as float32: kind fp32, bf16 or int8."""
    if kind == "fp32":
        return load(b, address, VF32)
    if kind == "bf16":
        return b.bitcast(b.shl(b.zext(load(b, address, VI16), VI32), isplat(16)), VF32)
    return b.sitofp(b.sext(load(b, address, VI8), VI32), VF32)


ITEMSIZE = {"fp32": 4, "bf16": 2, "int8": 1}


def accumulators(b: Any, n: int, lanes: int = LANES) -> list[Any]:
    """n vectors that live in registers (LLVM promotes the stack slots)."""
    kind = ir.VectorType(F32, lanes)
    return [cgutils.alloca_once_value(b, ir.Constant(kind, [0.0] * lanes)) for _ in range(n)]


# --- threads ------------------------------------------------------------------------------------------------------


@intrinsic
def atomic_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to an int64 that other threads see; returns what it was."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_swap(typingctx: Any, address: Any, value: Any) -> Any:
    """Store an int64 that other threads see; returns what it was."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("xchg", b.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_read(typingctx: Any, address: Any) -> Any:
    """An int64 that another thread may have changed."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load_atomic(b.inttoptr(args[0], I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def give_way(typingctx: Any, function: Any) -> Any:
    """Leave the core to others for microseconds: calls ``platform.System.give_way``, whose address is passed in."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(I32, [I32])  # SwitchToThread, on Windows, takes nothing and looks at nothing
        b.call(b.inttoptr(args[0], kind.as_pointer()), [ir.Constant(I32, platform.NAP_US)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def ticks(typingctx: Any, function: Any) -> Any:
    """The monotonic clock, in units of ``platform.TICK_S`` seconds; its address is passed in."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        slot = cgutils.alloca_once(b, ir.ArrayType(I64, 2))
        cells = b.bitcast(slot, I64.as_pointer())
        if platform.WINDOWS:
            kind = ir.FunctionType(I32, [I64.as_pointer()])
            b.call(b.inttoptr(args[0], kind.as_pointer()), [cells])
            return b.load(cells)
        kind = ir.FunctionType(I32, [I32, I64.as_pointer()])
        b.call(b.inttoptr(args[0], kind.as_pointer()), [ir.Constant(I32, platform.CLOCK_ID), cells])
        return b.add(b.mul(b.load(cells), const(1_000_000_000)), b.load(b.gep(cells, [const(1)])))

    return types.int64(types.int64), codegen


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tell the core that this is a waiting loop."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if X86:
            call(b, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_job(typingctx: Any, function: Any, rank: Any, team: Any, job: Any) -> Any:
    """Call a compiled ``void(int64, int64, int64)`` by its address: it is compiled once, not into each caller."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * 3)
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen
