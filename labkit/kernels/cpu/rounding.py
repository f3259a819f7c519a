# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""float32 to integers for the tiles of ``tiles``: the largest number, and the others as shares of it.

top            max |x|, at least so much             n a multiple of 8
round_bytes    round(x * factor)                     n a multiple of 8
round_words    the same, in the order of ``PAIRS``   n a multiple of 8
round_token    a token's record                      n_in a multiple of 8
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from labkit.kernels.cpu import simd
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.plan import TO_BYTES
from labkit.kernels.cpu.rowwise import array_at
from labkit.kernels.cpu.simd import I8, I16, I64, VF32, VI32, const, load
from labkit.kernels.packed import TOKEN_LEVELS
from labkit.kernels.panel_layout import BLOCK, WEIGHT_OFFSET


@intrinsic
def peak(typingctx: Any, x: Any, n: Any) -> Any:
    """max |x|, NaN when x is not finite: rounding to integers would hide it. n a multiple of 8."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, n = args
        slot, nothing = simd.accumulators(b, 2)
        with cgutils.for_range_slice(b, const(0), n, const(8), I64) as (at, _):
            v = simd.call(b, "llvm.fabs.v8f32", VF32, load(b, b.add(x, b.mul(at, const(4))), VF32))
            b.store(simd.call(b, "llvm.maxnum.v8f32", VF32, v, b.load(slot)), slot)
            b.store(simd.fma(b, v, simd.fsplat(0.0), b.load(nothing)), nothing)
        return b.fadd(simd.largest(b, b.load(slot)), simd.total(b, b.load(nothing)))

    return types.float32(types.int64, types.int64), codegen


@jit
def top(x, n, least):
    """max |x|, but at least ``least``; a NaN stays one."""
    found = peak(x, n)
    return least if found < least else found  # max() would lose it


PAIRS = (0, 2, 1, 3, 4, 6, 5, 7)
"""The order in which 16-bit weights come out of a unit's bytes (``integer_tiles``): activations are laid out to meet
them."""


def make_round(kind: Any, order: tuple[int, ...] = tuple(range(8))) -> Any:
    """round(x * factor) as ``kind`` integers, each eight in ``order``; returns their sum. n a multiple of 8."""

    @intrinsic
    def round_to(typingctx: Any, x: Any, n: Any, factor: Any, out: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            x, n, factor, out = args
            wide = simd.splat(b, factor)
            total = cgutils.alloca_once_value(b, ir.Constant(VI32, [0] * 8))
            with cgutils.for_range_slice(b, const(0), n, const(8), I64) as (at, _):
                v = b.fmul(load(b, b.add(x, b.mul(at, const(4))), VF32), wide)
                v = b.fptosi(simd.call(b, "llvm.nearbyint.v8f32", VF32, v), VI32)
                b.store(b.add(v, b.load(total)), total)
                v = b.shuffle_vector(v, v, ir.Constant(VI32, order)) if order != tuple(range(8)) else v
                simd.store(b, b.trunc(v, ir.VectorType(kind, 8)), b.add(out, b.mul(at, const(kind.width // 8))), 1)
            return simd.isum(b, b.load(total))

        return types.int32(types.int64, types.int64, types.float32, types.int64), codegen

    return round_to


round_words, round_bytes = make_round(I16, PAIRS), make_round(I8)


@jit
def round_token(x, n_in, rounds, to):
    """The record of a token, x (n_in,) float32, for weights whose ROUNDS it is: codes, steps, sums, all at ``to``.

    A step a block of 64 inputs, the largest of them over the levels; a sum for each of the blocks that the weights'
    scales make: float32, the activations' own, or for bytes the int32 that takes the weights' offset off."""
    padded, of_bytes = (n_in + BLOCK - 1) // BLOCK * BLOCK, rounds >= TO_BYTES
    size = rounds - TO_BYTES if of_bytes else rounds
    levels = np.float32(TOKEN_LEVELS if of_bytes else 32767)
    n_blocks, n_parts = padded // BLOCK, BLOCK // size
    steps = carray(array_at(to + 2 * padded), (n_blocks,), np.float32)
    sums = carray(array_at(to + 2 * padded + padded // 16), (n_blocks * n_parts,), np.float32)
    starts = carray(array_at(to + 2 * padded + padded // 16), (n_blocks,), np.int32)
    for block in range(n_blocks):
        at = BLOCK * block
        n = min(BLOCK, n_in - at)
        largest = top(x + 4 * at, n, np.float32(1e-30))
        step = largest / levels
        steps[block] = step
        if of_bytes:
            starts[block] = -WEIGHT_OFFSET * round_bytes(x + 4 * at, n, levels / largest, to + at)
            continue
        for part in range(n_parts):
            first = at + size * part
            here = max(0, min(size, n_in - first))
            total = round_words(x + 4 * first, here, levels / largest, to + 2 * first)
            sums[block * n_parts + part] = step * np.float32(total)
    each = 1 if of_bytes else 2
    tail = carray(array_at(to), (2 * padded,), np.int8)
    for i in range(each * n_in, each * padded):
        tail[i] = 0  # meets the weights' own zeros
