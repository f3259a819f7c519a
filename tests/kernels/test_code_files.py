"""Whose machine code is loaded: whole files, for this machine, that nobody else may change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import labkit
from labkit.kernels.cpu import code_files, machine_code


@pytest.fixture(scope="module")
def kept():
    """This machine's file."""
    machine_code.load()
    return next(path for folder in code_files.ours() if (path := folder / code_files.file_name()).is_file())


@pytest.fixture
def unloaded(monkeypatch):
    monkeypatch.setattr(machine_code, "_addresses", {})


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Where files are kept, in place of this machine's folders."""
    path = tmp_path / "a" / "b"
    monkeypatch.setattr(code_files, "folders", lambda: (path,))
    return path


def test_every_flipped_bit_of_its_head_is_found(kept, tmp_path):
    """And of its tail, where a zip file keeps its directory."""
    path, whole = tmp_path / kept.name, kept.read_bytes()
    for at in [*range(0, 400, 3), *range(len(whole) - 400, len(whole), 3)]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        assert code_files.read(path) == {}, at


def test_a_damaged_file_is_made_anew(kept, unloaded, folder, monkeypatch):
    folder.mkdir(parents=True)
    path = folder / code_files.file_name()
    whole = kept.read_bytes()
    path.write_bytes(whole[:40] + b"x" + whole[41:])
    for name, (symbol, content) in code_files.read(kept).items():
        code_files.keep_part(name, symbol, content)
    machine_code.load()
    assert code_files.read(path) == code_files.read(kept)


def test_a_file_for_another_machine_is_not_loaded_under_this_ones_name(kept, folder, monkeypatch):
    objects = code_files.read(kept)
    here = code_files.file_name()
    monkeypatch.setattr(code_files, "file_name", lambda: "labkit-000000000000-111111111111.zip")
    monkeypatch.setattr(code_files, "_loads", lambda path: True)
    assert code_files.keep(objects)
    (folder / "labkit-000000000000-111111111111.zip").rename(folder / here)
    monkeypatch.undo()
    assert code_files.read(folder / here) == {}


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
@pytest.mark.parametrize("what", ["file", "folder", "link"])
def test_what_others_may_write_is_neither_read_nor_written(kept, folder, what):
    folder.mkdir(parents=True)
    path = folder / code_files.file_name()
    path.write_bytes(kept.read_bytes())
    assert code_files.read(path)
    if what == "file":
        path.chmod(0o666)
        assert code_files.read(path) == {}
        assert code_files.refused() == [f"{path}: everybody may write to it"]
    elif what == "folder":
        folder.chmod(0o777)
        assert code_files.ours() == ()
        assert not code_files.is_kept()
        assert not code_files.keep({})
        assert code_files.refused() == [f"{folder}: everybody may write to it"]
    else:
        path.rename(folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")
        assert code_files.read(path) == {}


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root can give a file away")
def test_what_somebody_else_owns_is_not_loaded(kept, folder):
    folder.mkdir(parents=True)
    path = folder / code_files.file_name()
    path.write_bytes(kept.read_bytes())
    os.chown(path, 65534, 65534)
    assert code_files.read(path) == {}


def test_unfinished_files_follow_no_link(folder, tmp_path, monkeypatch):
    """A link under every name that was predictable once: its target is left alone."""
    folder.mkdir(parents=True)
    target = tmp_path / "precious"
    target.write_text("precious")
    part = code_files._part(folder, "meet")
    for name in (part.name, f"{part.name}.{os.getpid()}"):
        (folder / name).symlink_to(target)
    code_files.keep_part("meet", "meet", b"machine code")
    assert target.read_text() == "precious"
    assert code_files.parts(["meet"]) == {"meet": ("meet", b"machine code")}


HERE = {"PYTHONPATH": str(Path(labkit.__file__).parents[1])}
ELSEWHERE = "import os; os.chdir('/'); from labkit.resources import cache_folder; print(cache_folder())"


@pytest.mark.skipif(os.name == "nt", reason="homes are found in another way there")
@pytest.mark.parametrize("home", [{}, {"HOME": ""}, {"LABKIT_CACHE": "~nobody-of-that-name/x"}])
def test_a_user_without_a_home_has_a_cache_folder(home):
    env = {key: value for key, value in os.environ.items() if key not in ("HOME", "LABKIT_CACHE", "XDG_CACHE_HOME")}
    code = "import os; os.path.expanduser = lambda path: path; from labkit.resources import cache_folder; "
    done = subprocess.run(
        [sys.executable, "-c", code + "print(cache_folder())"], env=env | HERE | home, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert os.path.isabs(done.stdout.strip())


def test_a_relative_cache_folder_is_one_place(tmp_path):
    code = "import subprocess, sys; from labkit.resources import cache_folder; print(cache_folder(), flush=True); "
    code += f"subprocess.run([sys.executable, '-c', {ELSEWHERE!r}], check=True)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | HERE | {"LABKIT_CACHE": "here"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {str(tmp_path / "here")}
