"""Machine code is kept for the next process, which loads it without the compiler; what does not fit is made anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile

import pytest

from labkit.kernels.cpu import machine_code

IN_A_NEW_PROCESS = """
import sys
import labkit
from labkit.kernels import backends

model = labkit.load("random:tiny-llama")
assert backends.prepare("fused")
run = labkit.Pipeline(model, backend="fused").generate("Hello there", max_new_tokens=4, ignore_eos=True)
assert run.trace.meta["computed_by"] == "fused"
print(*run.token_ids, "numba" in sys.modules)
"""


@pytest.fixture(scope="module")
def kept():
    """This machine's file."""
    machine_code.load()
    found = [path for folder in machine_code.folders() if (path := folder / machine_code.file_name()).is_file()]
    assert found
    return found[0]


@pytest.fixture
def unloaded(monkeypatch):
    monkeypatch.setattr(machine_code, "_addresses", {})


def contents(path):
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def write(path, parts):
    with zipfile.ZipFile(path, "w") as file:
        for name, content in parts.items():
            file.writestr(name, content)


def test_a_new_process_needs_no_compiler(kept):
    runs = [
        subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS], capture_output=True, text=True, timeout=120)
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout.split()[-1] == "False"


@pytest.mark.parametrize("damage", ["empty", "cut short", "a function is missing", "a name is missing", "other bytes"])
def test_a_damaged_file_is_not_loaded(kept, unloaded, tmp_path, damage):
    path, parts = tmp_path / "code.zip", contents(kept)
    write(path, parts)
    whole = path.read_bytes()
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "cut short":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "a function is missing":
        write(path, {name: content for name, content in parts.items() if name != "decode"})
    elif damage == "a name is missing":
        write(path, parts | {machine_code.NAMES: b"{}"})
    else:
        at = whole.index(parts["decode"][:200]) + 100
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])  # its checksum no longer fits
    assert not machine_code._load_file(path)
    assert not machine_code._addresses


def test_the_name_says_sources_and_processor(monkeypatch):
    import llvmlite.binding as llvm

    def name():
        machine_code.file_name.cache_clear()
        return machine_code.file_name()

    here = name()
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "another")
    elsewhere = name()
    monkeypatch.setattr(machine_code, "digest", lambda sources: "f" * 64)
    changed = name()
    machine_code.file_name.cache_clear()
    assert len({here, elsewhere, changed}) == 3
    assert here.rsplit("-", 1)[0] == elsewhere.rsplit("-", 1)[0] != changed.rsplit("-", 1)[0]


def test_kept_files_of_other_sources_go_and_those_of_other_processors_stay(kept, tmp_path):
    sources = machine_code.file_name().rsplit("-", 1)[0]
    others = [tmp_path / "labkit-000000000000-111111111111.zip", tmp_path / f"{sources}-111111111111.zip"]
    for other in others:
        other.write_bytes(b"")
    parts = contents(kept)
    names = json.loads(parts.pop(machine_code.NAMES))
    objects = {name: (names[name], content) for name, content in parts.items()}
    assert machine_code.keep(objects, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([machine_code.file_name(), others[1].name])
    assert contents(tmp_path / machine_code.file_name()) == contents(kept)


def test_what_a_new_process_can_not_load_is_not_kept(kept, tmp_path):
    parts = contents(kept)
    names = json.loads(parts.pop(machine_code.NAMES))
    objects = {name: (names[name], content) for name, content in parts.items()} | {"decode": ("of nothing", b"damaged")}
    assert not machine_code.keep(objects, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_can_not_be_written_is_passed_over(kept, tmp_path):
    tmp_path.chmod(0o500)
    assert not machine_code.keep({}, tmp_path)
    tmp_path.chmod(0o700)


@pytest.fixture
def compiler(unloaded, monkeypatch, tmp_path):
    """A compiler that takes no time; what it compiled. Nothing it makes can be loaded."""
    from labkit.kernels.cpu import compiling

    asked = []

    def compile_one(name):
        asked.append(name)
        return compiling.Compiled(len(asked), name, b"machine code", {"numba_gil_ensure", "expf"}, None)

    monkeypatch.setattr(compiling, "compile_one", compile_one)
    monkeypatch.setattr(machine_code, "folders", lambda: (tmp_path / "a" / "b",))
    return asked


def test_without_a_folder_each_process_compiles(compiler, monkeypatch):
    monkeypatch.setattr(machine_code, "keep_parts", lambda objects: None)
    monkeypatch.setattr(machine_code, "keep", lambda objects, folder: False)
    machine_code.load()
    assert compiler == list(machine_code.SIGNATURES)
    assert machine_code.address(compiler[2]) == 3


def test_a_process_that_ended_too_soon_leaves_what_it_had(compiler, monkeypatch):
    monkeypatch.setattr(machine_code, "keep", lambda objects, folder: len(objects) == len(machine_code.SIGNATURES))
    monkeypatch.setattr(machine_code, "_load_file", lambda path: True)
    machine_code.keep_parts({"decode": ("decode", b"machine code"), "meet": ("meet", b"machine code")})
    machine_code.load()
    assert compiler == [name for name in machine_code.SIGNATURES if name not in ("decode", "meet")]
    assert set(machine_code.parts()) == set(machine_code.SIGNATURES)


def test_code_that_needs_numba_is_not_kept(compiler, monkeypatch):
    monkeypatch.setattr(machine_code, "UNREACHED", ())
    machine_code.load()
    assert not machine_code.parts()
    assert machine_code.address(compiler[0]) == 1
