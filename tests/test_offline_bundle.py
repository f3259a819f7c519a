"""The folder for a class without a network installs from itself alone, and the model comes out of it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def without_network() -> list[str]:
    """A command prefix that takes the network away, where the system lets us: Linux's own name spaces."""
    unshare = shutil.which("unshare")
    works = unshare and subprocess.run([unshare, "-rn", "true"], capture_output=True).returncode == 0
    return [unshare, "-rn"] if unshare and works else []


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, default_model):
    """labkit's own wheel alone: the packages that it needs are too large to be copied for a test."""
    pytest.importorskip("hatchling", reason="the build back-end is a test dependency: pip install -e .[test]")
    folder = tmp_path_factory.mktemp("stick") / "labkit-offline"
    module(ROOT / ".ci" / "offline_bundle.py").build(folder, ["--no-deps", "--no-build-isolation", "--quiet"])
    return folder


def test_it_holds_wheels_model_notebooks_and_says_what_for(bundle):
    names = {path.name for path in bundle.iterdir()}
    assert names == {"wheels", "model", "notebooks", "install.py", "made_for.json", "README.txt"}
    assert [path.suffix for path in (bundle / "wheels").iterdir()] == [".whl"]
    assert (bundle / "notebooks" / "00_start_here.ipynb").is_file()
    assert f"Python {sys.version_info[0]}.{sys.version_info[1]}" in (bundle / "README.txt").read_text()


def test_it_installs_without_a_network_and_the_model_comes_out_of_it(bundle, tmp_path):
    code = (
        "import importlib.util, pathlib, sys\n"
        f"spec = importlib.util.spec_from_file_location('install', {str(bundle / 'install.py')!r})\n"
        "install = importlib.util.module_from_spec(spec); spec.loader.exec_module(install)\n"
        "install.check()\n"
        f"print(install.install(pathlib.Path({str(tmp_path / 'lab')!r}), '--no-deps'))"
    )
    bare = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_INDEX_URL")}
    done = subprocess.run([*without_network(), sys.executable, "-c", code], env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    python = Path(done.stdout.split()[-1])
    (model,) = (bundle / "model").iterdir()
    needed = bare | {"PYTHONPATH": sysconfig.get_path("purelib"), "LABKIT_CACHE": str(tmp_path / "cache")}
    fetch = [str(python), "-m", "labkit.cli", "fetch", "--from", str(model)]
    done = subprocess.run(
        [*without_network(), *fetch], cwd=tmp_path / "lab", env=needed, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "cache" / "models" / model.name).stat().st_size == model.stat().st_size
    ours = [str(python), "-c", "import labkit; print(labkit.__file__)"]
    where = subprocess.run(ours, cwd=tmp_path / "lab", env=needed, capture_output=True, text=True, check=True).stdout
    assert Path(where.strip()).is_relative_to(tmp_path / "lab"), "labkit is the wheel's"
    assert (tmp_path / "lab" / "notebooks" / "00_start_here.ipynb").is_file()


def test_another_machine_is_told_so(bundle, tmp_path):
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    shutil.copy(bundle / "install.py", elsewhere)
    made_for = {"system": "Plan9", "machine": "mips", "python": "3.10"}
    (elsewhere / "made_for.json").write_text(json.dumps(made_for))
    with pytest.raises(SystemExit, match="These wheels are for Plan9 on mips"):
        module(elsewhere / "install.py").check()
