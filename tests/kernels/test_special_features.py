"""What better processors ask for beside a list of features: the system's word, its permission, a reader of assembly."""

from __future__ import annotations

import os
import subprocess
import sys

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from labkit.kernels.cpu import amx_tile, arm_features, integer_dots, integer_tiles, tier_check, tiers, tile_permission
from labkit.kernels.cpu.simd import I8, I32, I64, const, load, splat, store

AMX = tiers.find("amx")


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv("NUMBA_CPU_FEATURES", raising=False)
    monkeypatch.delenv("NUMBA_CPU_NAME", raising=False)


@pytest.mark.parametrize(("platform", "bits", "has"), [
    ("linux", {16: 1 << 20, 26: 1 << 13}, {"dotprod", "i8mm"}), ("linux", {16: 1 << 20, 26: 0}, {"dotprod"}),
    ("linux", {16: 1 << 13, 26: 1 << 20}, set()), ("win32", {16: -1, 26: -1}, set()),
])  # fmt: skip
def test_an_arm_processors_dot_products_are_asked_of_the_system(monkeypatch, platform, bits, has):
    """LLVM's list, which says nothing of them, is not enough."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(arm_features, "_auxiliary", bits.get)
    assert arm_features.found() == has
    monkeypatch.setattr(tiers, "architecture", lambda: "aarch64")
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: {"neon": True, "aes": True, "lse": False})
    assert tiers.features() == has | {"neon", "aes"}
    wanted = {"i8mm": ["i8mm", "dotprod", "plain"], "dotprod": ["dotprod", "plain"]}
    assert [tier.name for tier in tiers.available()] == wanted.get(max(has, default=""), ["plain"])
    assert set(tiers.for_numba()["NUMBA_CPU_FEATURES"].split(",")) == {f"+{name}" for name in has | {"neon", "aes"}}
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "")  # whoever sets it is heard
    assert tiers.for_numba() == {}


@pytest.mark.skipif(tiers.architecture() != "x86_64", reason="numba compiles for this architecture alone")
@pytest.mark.parametrize("name", ["avx512vnni", "avxvnni"])
def test_numba_compiles_a_tile_for_a_better_processor(name):
    """LLVM as numba starts it reads no assembly, and ends the process. Compiled apart, and not run."""
    tier = tiers.find(name)
    source = (
        "from numba import njit, types; from labkit.kernels.cpu import integer_tiles as it, tiers;"
        f"tile = it.make_tile(1, it.nibbles, tiers.find({name!r}));"
        "njit(types.void(types.int64))(lambda x: tile(x, 3, 4, x, 1, x, x, 1, x, x, 0, x, 64, 1, x, 1))"
    )
    numbas = {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": tiers.spelled(tier.needs)}
    command = [sys.executable, "-c", source]
    done = subprocess.run(
        command, env=os.environ | numbas | {tiers.VARIABLE: "plain"}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("granted", [True, False])
def test_tiles_are_used_where_the_system_permits_them(monkeypatch, granted):
    monkeypatch.setattr(tiers, "architecture", lambda: "x86_64")
    monkeypatch.setattr(tiers, "features", lambda: AMX.needs)
    monkeypatch.setattr(tile_permission, "granted", lambda: granted)
    assert [tier.name for tier in tiers.available()][:2] == (
        ["amx", "avx512vnni"] if granted else ["avx512vnni", "avx2"]
    )


def test_the_system_says_no_where_it_knows_no_tiles(monkeypatch, capsys):
    monkeypatch.setattr(tile_permission, "REQUEST", 0x0FFF)  # no such request
    tile_permission.granted.cache_clear()
    assert not tile_permission.granted()
    assert tier_check.main("amx") == 1
    assert "does not permit" in capsys.readouterr().err
    tile_permission.granted.cache_clear()


def in_plain_vectors(b, inputs, stride, weights, sums):
    """``amx_tile.multiply`` for any processor: a block of 16 inputs."""
    with cgutils.for_range(b, const(16), intp=I64) as loop:
        row, total = b.add(inputs, b.mul(stride, loop.index)), ir.Constant(ir.VectorType(I32, 16), [0] * 16)
        for i in range(0, BLOCK, 4):
            some = b.bitcast(splat(b, load(b, b.add(row, const(i)), I32), 16), ir.VectorType(I8, 64))
            w = load(b, b.add(weights, const(16 * i)), ir.VectorType(I8, 64))
            total = integer_dots.add_bytes(b, tiers.PLAIN, total, w, some)
        store(b, total, b.add(sums, b.mul(loop.index, const(64))))


BLOCK = 16


def test_around_the_tile_stand_the_operations_of_every_other_tier(monkeypatch):
    """The tile's own instruction replaced: sixteen tokens get the bits that they get one by one."""
    monkeypatch.setattr(amx_tile, "configure", lambda b, size: None)
    monkeypatch.setattr(amx_tile, "release", lambda b: None)
    monkeypatch.setattr(amx_tile, "multiply", in_plain_vectors)
    rng, n_blocks = np.random.default_rng(0), 8
    n = n_blocks * BLOCK
    panel = rng.integers(0, 256, 16 * n, np.uint8)
    x = rng.integers(-63, 64, (16, n)).astype(np.int8)
    starts, steps = rng.integers(-9999, 9999, (16, n_blocks), np.int32), rng.random((16, n_blocks), np.float32)
    tokens = np.ascontiguousarray(np.concatenate([part.view(np.uint8) for part in (x, steps, starts)], axis=1))
    scales, before = rng.random((n_blocks, 16), np.float32), rng.random((16, 16), np.float32)
    one, sixteen = integer_tiles.make_tile(1, integer_tiles.unsigned_bytes, tiers.PLAIN), amx_tile.of_unsigned

    def run(tile, n_turns, fresh):
        @njit(types.void(*[types.int64] * 5), error_model="numpy")
        def compiled(panel, x, stride, scales, out):
            for t in range(n_turns):
                at = x + t * stride
                place, steps = out + 64 * t, at + n
                tile(panel, n_blocks, BLOCK // 8, at, stride, steps, steps + 4 * n_blocks, 1, scales, 0, 1, place, 64,
                     fresh, panel, 1)  # fmt: skip

        out = before.copy()
        compiled(panel.ctypes.data, tokens.ctypes.data, tokens.shape[1], scales.ctypes.data, out.ctypes.data)
        return out

    for fresh in (0, 1):
        alone = run(one, 16, fresh)
        assert np.abs(alone).max() > 1.0
        assert np.array_equal(run(sixteen, 1, fresh), alone)
