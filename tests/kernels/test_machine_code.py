"""Machine code is kept for the next process, which loads it without the compiler; what does not fit is made anew."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import zipfile

import pytest

from labkit.kernels.cpu import code_files, compile_apart, machine_code, tiers

IN_A_NEW_PROCESS = """
import sys
import labkit
from labkit import backends

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
    found = [path for folder in code_files.folders() if (path := folder / code_files.file_name()).is_file()]
    assert found
    return found[0]


@pytest.fixture
def unloaded(monkeypatch):
    monkeypatch.setattr(machine_code, "_addresses", {})


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Where files are kept, in place of this machine's folders."""
    path = tmp_path / "a" / "b"
    monkeypatch.setattr(code_files, "folders", lambda: (path,))
    return path


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
        write(path, {name: content for name, content in parts.items() if name != "step"})
    elif damage == "a name is missing":
        write(path, parts | {code_files.NAMES: b"{}"})
    else:
        at = whole.index(parts["step"][:200]) + 100
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])  # its checksum no longer fits
    assert not machine_code.load_file(path)
    assert not machine_code._addresses


def test_the_name_says_sources_and_processor(monkeypatch):
    import llvmlite.binding as llvm

    def name():
        code_files._here.cache_clear()
        return code_files.file_name()

    here = name()
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "another")
    elsewhere = name()
    monkeypatch.setattr(code_files, "digest", lambda sources: "f" * 64)
    changed = name()
    code_files._here.cache_clear()
    assert len({here, elsewhere, changed}) == 3
    assert here.split("-")[:2] == elsewhere.split("-")[:2] != changed.split("-")[:2]


def objects_of(kept):
    parts = contents(kept)
    names = json.loads(parts.pop(code_files.NAMES))
    return {name: (names[name], content) for name, content in parts.items()}


def test_one_file_takes_the_place_of_parts_and_of_other_sources_and_leaves_other_processors(kept, folder):
    name = code_files.file_name()
    elsewhere = folder / f"{name.rsplit('-', 1)[0]}-111111111111.zip"
    code_files.keep_part("meet", "meet", b"machine code")
    for other in (folder / "labkit-000000000000-111111111111.zip", elsewhere):
        other.write_bytes(b"")
    assert len(list(folder.iterdir())) == 3
    assert code_files.keep(objects_of(kept))
    assert sorted(path.name for path in folder.iterdir()) == sorted([name, elsewhere.name])
    assert contents(folder / name) == contents(kept)


def test_what_a_new_process_can_not_load_is_not_kept(kept, folder):
    assert not code_files.keep(objects_of(kept) | {"step": ("of nothing", b"damaged")})
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_can_not_be_written_is_passed_over(kept, folder, tmp_path):
    tmp_path.chmod(0o500)
    assert not code_files.can_keep()
    assert not code_files.keep({})
    tmp_path.chmod(0o700)


def without_count(symbol):
    """numba numbers what a process compiles."""
    return re.sub(r"B\d+v\d+", "", symbol)


IN_ANOTHER_FOLDER = """
import sys
from pathlib import Path
from labkit.kernels.cpu import code_files, compiling

code_files.folders = lambda: (Path(sys.argv[1]),)
compiling.main(sys.argv[2:])
"""


def test_a_process_of_its_own_leaves_functions(kept, folder, monkeypatch):
    """The real compiler, in a real process, on the two quickest functions."""
    quick, seen = {name: machine_code.SIGNATURES[name] for name in ("publish", "meet")}, []
    monkeypatch.setattr(compile_apart, "SIGNATURES", quick)
    monkeypatch.setattr(
        compile_apart,
        "_begin",
        lambda names: subprocess.Popen([sys.executable, "-c", IN_ANOTHER_FOLDER, str(folder), *names]),
    )
    compile_apart.compile_all(seen.append)
    made = code_files.parts(quick)
    assert {name: without_count(symbol) for name, (symbol, _) in made.items()} == {
        name: without_count(objects_of(kept)[name][0]) for name in quick
    }
    assert all(len(content) > 1000 for _, content in made.values())
    assert seen[-1] == 2


def test_a_process_that_finds_it_done_ends(kept):
    assert compile_apart._begin(["meet", "publish"]).wait(60) == 0


@pytest.fixture
def compiler(unloaded, monkeypatch, folder):
    """A compiler that takes no time, its processes within this one; what it compiled. Nothing of it can be loaded."""
    from labkit.kernels.cpu import compiling

    asked = []

    def compile_one(name):
        asked.append(name)
        return compiling.Compiled(len(asked), name, b"machine code", {"numba_gil_ensure", "expf"}, None)

    class Ended:
        def __init__(self, names):
            compiling.compile_and_keep(names)

        def poll(self):
            return 0

    monkeypatch.setattr(compiling, "compile_one", compile_one)
    monkeypatch.setattr(compile_apart, "_begin", Ended)
    monkeypatch.setattr(tiers, "CHECKED", [tier.name for tier in tiers.available()])  # none is refused for what fails
    return asked


def test_without_a_folder_each_process_compiles(compiler, monkeypatch):
    monkeypatch.setattr(code_files, "can_keep", lambda: False)
    monkeypatch.setattr(code_files, "keep", lambda objects: False)
    counted = []
    machine_code.load(counted.append)
    assert compiler == list(machine_code.SIGNATURES)
    assert counted == list(range(1, len(machine_code.SIGNATURES) + 1))
    assert machine_code.address(compiler[2]) == 3


def test_a_process_that_ended_too_soon_leaves_what_it_had(compiler, monkeypatch):
    monkeypatch.setattr(code_files, "keep", lambda objects: len(objects) == len(machine_code.SIGNATURES))
    monkeypatch.setattr(machine_code, "_load_kept", lambda: bool(compiler))
    for name in ("step", "meet"):
        code_files.keep_part(name, name, b"machine code")
    machine_code.load()
    assert sorted(compiler) == sorted(set(machine_code.SIGNATURES) - {"step", "meet"})


def test_a_part_that_is_damaged_is_compiled_again(compiler, folder):
    code_files.keep_part("step", "step", b"machine code")
    (part,) = folder.iterdir()
    part.write_bytes(part.read_bytes()[:40])
    compile_apart.compile_all(lambda n: None)
    assert "step" in compiler
    assert set(code_files.parts(machine_code.SIGNATURES)) == set(machine_code.SIGNATURES)


def test_a_file_that_is_damaged_is_made_anew(kept, unloaded, folder):
    for name, (symbol, content) in objects_of(kept).items():
        code_files.keep_part(name, symbol, content)
    (folder / code_files.file_name()).write_bytes(kept.read_bytes()[:1000])
    machine_code.load()
    assert contents(folder / code_files.file_name()) == contents(kept)
    assert set(machine_code._addresses) == set(machine_code.SIGNATURES)


def test_two_processes_do_not_compile_the_same(compiler, folder):
    """The second waits for the first, which leaves what the second then finds."""
    from labkit.kernels.cpu import compiling

    names, begun = list(machine_code.SIGNATURES), threading.Event()
    with code_files.alone(names[0]):
        second = threading.Thread(target=lambda: (begun.set(), compiling.main(names)))
        second.start()
        assert begun.wait(10)
        time.sleep(0.3)
        assert compiler == []
        compiling.compile_and_keep(names)
        first = len(compiler)
    second.join(30)
    assert not second.is_alive()
    assert len(compiler) == first


def test_code_that_needs_numba_is_not_kept(compiler, monkeypatch):
    from labkit.kernels.cpu import compiling

    monkeypatch.setattr(compiling, "UNREACHED", ())
    machine_code.load()
    assert not code_files.parts(machine_code.SIGNATURES)
    assert machine_code.address(compiler[-1])
