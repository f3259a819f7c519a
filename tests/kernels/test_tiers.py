"""Tiers of instructions: the same numbers from each, chosen by what the processor has, and never one that it lacks."""

from __future__ import annotations

import subprocess

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir
from numba import njit, types

from labkit import doctor
from labkit.kernels.cpu import code_files, integer_tiles, machine_code, tier_check, tiers
from labkit.kernels.cpu.integer_tiles import nibbles, signed_bytes, unsigned_bytes, words
from labkit.kernels.cpu.tiers import PLAIN, Tier

HERE = tiers.available()
WIDE = Tier("plain", "", lanes=16)
"""The layout of a tier of 512 bits, which any processor can run."""
INSTRUCTIONS = {
    "amx": {"tdpbsud": "%tmm", "vpdpbusd": "%zmm", "vpdpwssd": "%zmm"},
    "avx512vnni": {"vpdpbusd": "%zmm", "vpdpwssd": "%zmm"},
    "avxvnni": {"vpdpbusd": "%ymm", "vpdpwssd": "%ymm"},
    "avx2": {"vpmaddubsw": "%ymm", "vpmaddwd": "%ymm"},
    "i8mm": {"usdot": ".16b"},
    "dotprod": {"sdot": ".16b"},
}
TRIPLES = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}
BEYOND = {
    "avx512vnni": ("%tmm",),
    "avx2": ("vpdp", "%zmm"),
    "avxvnni": ("%zmm",),
    "dotprod": ("usdot",),
    "plain": ("vp", "%ymm", "sdot"),
}
"""What a tier's processor does not have."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No choice made yet, and no verdict kept."""
    monkeypatch.delenv(tiers.VARIABLE, raising=False)
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    tiers.choice.cache_clear()
    yield
    tiers.choice.cache_clear()


@pytest.mark.parametrize("tier", [*HERE, WIDE], ids=lambda tier: f"{tier.name} {tier.lanes}")
def test_products_are_exact_on_every_tier_of_this_processor(tier):
    tier_check.initialize()
    assert tier_check.differences(tier) == []


@pytest.mark.parametrize("architecture", TRIPLES)
def test_the_compiler_makes_each_tiers_instructions(architecture):
    """For this processor and for others: nothing is run."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    tier_check.initialize()
    try:
        llvm.Target.from_triple(TRIPLES[architecture])
    except RuntimeError:
        pytest.skip(f"this llvmlite is built without {architecture}")
    for tier in tiers.TIERS[architecture]:
        lines = tier_check.assembly(tier, tier.lanes, TRIPLES[architecture]).splitlines()
        for instruction, register in INSTRUCTIONS.get(tier.name, {}).items():
            assert any(instruction in line and register in line for line in lines), (tier.name, instruction)
        code = [line for line in lines if line.startswith("\t") and not line.lstrip().startswith((".", "#"))]
        assert not [line for line in code for word in BEYOND.get(tier.name, ()) if word in line]


def tile_assembly(tier, source, triple):
    """The widest tile, as the compiler makes it for a processor of the tier."""

    class Context:
        def get_dummy_value(self):
            return None

    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 16), "tile")
    b = ir.IRBuilder(function.append_basic_block())
    tile = integer_tiles.make_tile(8 if tier.lanes == 16 else 4, source, tier)
    _, codegen = tile._defn(None, *[None] * 16)
    codegen(Context(), b, None, list(function.args))
    b.ret_void()
    machine = llvm.Target.from_triple(triple).create_target_machine(features=tiers.spelled(tier.needs), opt=3)
    parsed = llvm.parse_assembly(str(module))
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(3))
    builder.getModulePassManager().run(parsed, builder)
    return machine.emit_assembly(parsed).splitlines()


@pytest.mark.parametrize("source", [nibbles, unsigned_bytes], ids=lambda source: source.__name__)
@pytest.mark.parametrize("name", ["avx512vnni", "avxvnni", "i8mm", "dotprod"])
def test_whole_tiles_compile_for_other_processors(name, source):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    tier_check.initialize()
    architecture = "aarch64" if name in ("i8mm", "dotprod") else "x86_64"
    try:
        lines = tile_assembly(tiers.find(name), source, TRIPLES[architecture])
    except RuntimeError as error:
        pytest.skip(f"this llvmlite is built without {architecture}: {error}")
    pairs = "vpdpwssd" if architecture == "x86_64" else "smull"
    wanted = pairs if source is nibbles else next(word for word in INSTRUCTIONS[name] if word != "vpdpwssd")
    assert sum(wanted in line for line in lines) >= (32 if source is nibbles else 16)
    assert not [line for line in lines if line.startswith("\tcall")], "nothing that would have to be linked"


def test_wrong_products_are_found(monkeypatch):
    """Bytes without sign taken as signed: right until one is above 127."""
    tier_check.initialize()
    dot = lambda b, tier, total, x, y: tier_check.integer_dots._plain(b, total, b.sext(x, _wide(total)), y, 4)  # noqa: E731
    monkeypatch.setitem(tier_check.DOTS, "bytes", (dot, *tier_check.DOTS["bytes"][1:]))
    assert tier_check.differences(PLAIN) == ["bytes, 8 lanes"]


def _wide(total):
    return tier_check.ir.VectorType(tier_check.I32, 4 * total.type.count)


@pytest.mark.parametrize("source", [nibbles, signed_bytes, words, unsigned_bytes], ids=lambda source: source.__name__)
def test_tiles_give_the_same_bits_on_every_tier(source):
    """Vectors of 8 rows and of 16: each output is summed up in the same order."""
    rng = np.random.default_rng(0)
    of_bytes, n_units = source is unsigned_bytes, 12
    panel = rng.integers(0, 256, n_units * integer_tiles.UNIT_BYTES[source], np.uint8)
    if source is words:
        panel = rng.integers(-128, 128, n_units * 128, np.int16).view(np.uint8)
    most, kind = (63, np.int8) if of_bytes else (32767, np.int16)
    x = rng.integers(-most, most + 1, (2, 8 * n_units)).astype(kind)
    sums = rng.integers(-9999, 9999, (2, 3), np.int32) if of_bytes else rng.normal(size=(2, 3)).astype(np.float32)
    tokens = np.concatenate([part.view(np.uint8) for part in (x, rng.random((2, 4), np.float32), sums)], axis=1).copy()
    scales, minima = rng.random((3, 16), np.float32), rng.random((3, 16), np.float32)

    def multiply(tier):
        tile = integer_tiles.make_tile(2, source, tier)

        @njit(types.void(*[types.int64] * 6), error_model="numpy")
        def run(panel, x, stride, scales, minima, out):
            steps = x + stride - 28
            tile(panel, 3, 4, x, stride, steps, steps + 16, 1, scales, minima, 0, out, 64, 1, panel, 1)

        out = np.empty((2, 16), np.float32)
        low = 0 if of_bytes else minima.ctypes.data
        run(panel.ctypes.data, tokens.ctypes.data, tokens.shape[1], scales.ctypes.data, low, out.ctypes.data)
        return out

    plain = multiply(PLAIN)
    assert np.abs(plain).max() > 1.0
    for tier in (*HERE[:-1], WIDE):
        assert np.array_equal(multiply(tier), plain), tier


def test_a_variable_forces_a_lower_tier(monkeypatch):
    monkeypatch.setattr(tiers, "check", lambda tier: "")
    assert tiers.in_use() == next(tier for tier in HERE if tier.name not in tiers.WAITING)
    for tier in HERE:
        monkeypatch.setenv(tiers.VARIABLE, tier.name.upper())
        tiers.choice.cache_clear()
        assert tiers.in_use() == tier


@pytest.mark.parametrize(("asked", "why"), [("sse9", "there is no such tier"), ("", "")])
def test_what_is_not_there_is_refused_with_what_is(monkeypatch, asked, why):
    foreign = next(name for name in ("dotprod", "avx2") if name not in [tier.name for tier in HERE])
    monkeypatch.setenv(tiers.VARIABLE, asked or foreign)
    names = ", ".join(tier.name for tier in HERE)
    with pytest.raises(
        ValueError, match=f"{why or 'this processor lacks it'}. It has {names}; unset LABKIT_CPU for the best"
    ):
        tiers.choice()
    found = doctor.check_instructions()
    assert found.status == "fail"
    assert (asked or foreign) in found.remedy
    assert doctor.check_machine_code().status == "note"


BETTER = Tier("better", "an instruction of tomorrow")


@pytest.fixture
def better(monkeypatch):
    """A processor with a tier above those that are always right."""
    monkeypatch.setattr(tiers, "available", lambda: (BETTER, PLAIN))


@pytest.mark.usefixtures("better")
def test_a_tier_that_waits_is_used_when_it_is_named(monkeypatch):
    monkeypatch.setattr(tiers, "WAITING", ("better",))
    monkeypatch.setattr(tiers, "check", lambda tier: "")
    assert tiers.in_use() == PLAIN
    monkeypatch.setenv(tiers.VARIABLE, "better")
    tiers.choice.cache_clear()
    assert tiers.in_use() == BETTER


@pytest.mark.usefixtures("better")
def test_a_tier_that_was_run_in_an_emulator_alone_serves_once_it_was_tried(monkeypatch):
    tried = []
    monkeypatch.setattr(tiers, "check", lambda tier: tried.append(tier) or "")
    assert tiers.choice() == tiers.Choice(BETTER)
    assert tried == [BETTER]
    found = doctor.check_instructions()
    assert (found.status, found.remedy) == ("ok", "")
    assert "tried on this machine" in found.found


@pytest.mark.usefixtures("better")
def test_a_tier_that_fails_its_check_is_not_used_and_doctor_says_so(monkeypatch):
    asked = []
    monkeypatch.setattr(tiers, "check", lambda tier: asked.append(tier) or "its check ended with -4")
    for _ in range(2):
        tiers.choice.cache_clear()
        assert tiers.choice() == tiers.Choice(PLAIN, (("better", "its check ended with -4"),))
    assert len(asked) == 1, "a verdict is kept"
    found = doctor.check_instructions()
    assert found.status == "note"
    assert found.remedy == "better is not used: its check ended with -4."


@pytest.mark.usefixtures("better")
def test_a_check_that_could_not_be_run_is_run_again(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("check", 1)

    monkeypatch.setattr(tiers.subprocess, "run", broken)
    assert tiers.in_use() == PLAIN
    monkeypatch.setattr(tiers, "check", lambda tier: "")
    tiers.choice.cache_clear()
    assert tiers.in_use() == BETTER
    monkeypatch.setattr(tiers, "check", broken)  # passed once, and that is kept
    tiers.choice.cache_clear()
    assert tiers.in_use() == BETTER


def test_a_check_ends_no_process_but_its_own():
    """An instruction that the processor lacks: LLVM, or the system, ends whoever asks for it."""
    every = tiers.TIERS[tiers.architecture()]
    lacked = [tier for tier in every[: every.index(HERE[0])] if not tier.has_tiles]  # those are asked for, and refused
    if not lacked:
        pytest.skip("this processor has the best tier there is")
    assert tiers.check(lacked[0]).startswith("its check ended with -")


def test_numbas_variables_are_heard(monkeypatch):
    """LLVM ends a process that asks for an instruction which the compiler was told to do without."""
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert [tier.name for tier in tiers.available()] == ["plain"]
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx2,+fma,+f16c,-avx512f")
    assert tiers.features() == {"avx2", "fma", "f16c"}


def test_machine_code_is_kept_by_tier(monkeypatch):
    names = set()
    for tier in HERE:
        monkeypatch.setattr(tiers, "in_use", lambda tier=tier: tier)
        names.add(code_files.file_name())
    assert len(names) == len(HERE)


@pytest.mark.usefixtures("better")
def test_only_what_is_tested_is_compiled_in_the_process_that_asks(monkeypatch):
    """Compiling apart left nothing, perhaps because the compiler ended: a better tier is then not tried here."""
    monkeypatch.setattr(tiers, "check", lambda tier: "")
    monkeypatch.setattr(tiers, "_refused", {})
    monkeypatch.setattr(machine_code, "_addresses", {})
    monkeypatch.setattr(machine_code, "_load_kept", lambda: False)
    monkeypatch.setattr(machine_code, "_compile_apart", lambda progress: False)
    compiled = []

    def compile_here(progress):
        compiled.append(tiers.in_use())
        machine_code._addresses["step"] = 1

    monkeypatch.setattr(machine_code, "_compile_here", compile_here)
    assert tiers.in_use() == BETTER
    machine_code.load()
    assert compiled == [PLAIN]
    assert tiers.choice().refused[0][0] == "better"
