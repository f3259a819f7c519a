"""A tier's products beside exact ones: tried in a process of its own before anything is compiled for the tier.

python -m labkit.kernels.cpu.tier_check avx512vnni        ends with 0 when all are right
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
from llvmlite import binding as llvm
from llvmlite import ir

from labkit.kernels.cpu import integer_dots, tiers, tile_permission
from labkit.kernels.cpu.tiers import Tier

I8, I16, I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
DOTS = {"pairs": (integer_dots.add_pairs, I16, 2), "bytes": (integer_dots.add_bytes, I8, 4)}
"""By name: the product, what its inputs are, and how many of them go into a sum."""
ROUNDS = 200


def module(tier: Tier, lanes: int) -> ir.Module:
    """``void pairs(int32 *total, x, y)`` and ``bytes``: one product each, the sums in place. Where the tier has tiles,
    ``void tiles(int32 *sums, x, y)``: 16 by 16 sums of 64 products."""
    made = ir.Module()
    for name, (dot, kind, each) in DOTS.items():
        sums, inputs = ir.VectorType(I32, lanes), ir.VectorType(kind, each * lanes)
        pointers = [sums.as_pointer(), inputs.as_pointer(), inputs.as_pointer()]
        function = ir.Function(made, ir.FunctionType(ir.VoidType(), pointers), name)
        b = ir.IRBuilder(function.append_basic_block())
        total, x, y = (b.load(argument, align=1) for argument in function.args)
        b.store(dot(b, tier, total, x, y), function.args[0], align=1)
        b.ret_void()
    if tier.has_tiles:
        _add_tiles(made)
    return made


def _add_tiles(made: ir.Module) -> None:
    from labkit.kernels.cpu import amx_tile  # numba's, which the other checks can do without

    word = ir.IntType(64)
    function = ir.Function(made, ir.FunctionType(ir.VoidType(), [word] * 3), "tiles")
    b = ir.IRBuilder(function.append_basic_block())
    sums, x, y = function.args
    amx_tile.configure(b, word(64))
    amx_tile.multiply(b, x, word(64), y, sums)
    amx_tile.release(b)
    b.ret_void()


def assembly(tier: Tier, lanes: int, triple: str) -> str:
    """The same for a processor that has the tier's features and no more, this one or another."""
    machine = llvm.Target.from_triple(triple).create_target_machine(features=tiers.spelled(tier.needs), opt=3)
    return machine.emit_assembly(llvm.parse_assembly(str(module(tier, lanes))))


def engine(tier: Tier, lanes: int) -> Any:
    """Machine code for this processor."""
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=tiers.spelled(tiers.features()), opt=3, jit=True
    )
    made = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module(tier, lanes))), machine)
    made.finalize_object()
    return made


def initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()


def differences(tier: Tier) -> list[str]:
    """Which products are wrong, on random numbers and on the largest."""
    rng, wrong = np.random.default_rng(0), []
    for lanes in {8, tier.lanes}:
        made = engine(tier, lanes)
        for name, (_, kind, each) in DOTS.items():
            call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(made.get_function_address(name))
            for turn in range(ROUNDS):
                total, x, y = _numbers(rng, name, kind.width, lanes, each, turn)
                wanted = total + (x.astype(np.int32) * y.astype(np.int32)).reshape(lanes, each).sum(1, dtype=np.int32)
                call(total.ctypes.data, x.ctypes.data, y.ctypes.data)
                if not np.array_equal(total, wanted):
                    wrong.append(f"{name}, {lanes} lanes")
                    break
    if tier.has_tiles and not _tiles_are_right(rng, made):
        wrong.append("tiles")
    return wrong


def _tiles_are_right(rng: Any, made: Any) -> bool:
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(made.get_function_address("tiles"))
    for turn in range(ROUNDS):
        x, y = rng.integers(-127, 128, (16, 64), np.int8), rng.integers(0, 256, (16, 16, 4), np.uint8)
        if turn < 4:
            x, y = np.full_like(x, 127 if turn % 2 else -127), np.full_like(y, 255 if turn < 2 else 0)
        sums, rows = np.empty((16, 16), np.int32), y.transpose(1, 0, 2).reshape(16, 64)
        call(sums.ctypes.data, x.ctypes.data, y.ctypes.data)
        if not np.array_equal(sums, x.astype(np.int32) @ rows.astype(np.int32).T):
            return False
    return True


def _numbers(rng: Any, name: str, bits: int, lanes: int, each: int, turn: int) -> tuple[np.ndarray, ...]:
    """A product's inputs: the first turns have the largest that it is promised."""
    n, total = lanes * each, rng.integers(-(2**28), 2**28, lanes, np.int32)
    low, high = (0, 255) if name == "bytes" else (-32767, 32767)
    most = 63 if name == "bytes" else 32767
    x, y = rng.integers(low, high + 1, n), rng.integers(-most, most + 1, n)
    if turn < 4:
        x, y = np.full(n, high if turn < 2 else low), np.full(n, most if turn % 2 else -most)
        if name == "pairs":
            y //= 2  # two of the largest products would not fit an int32
    return total, x.astype(np.uint8 if name == "bytes" else np.int16), y.astype(np.int8 if bits == 8 else np.int16)


def main(name: str) -> int:
    initialize()
    tier = tiers.find(name)
    if tier.has_tiles and not tile_permission.granted():
        print("the system does not permit the tiles", file=sys.stderr)
        return 1
    wrong = differences(tier)
    if wrong:
        print(f"wrong products: {'; '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
