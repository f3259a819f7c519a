"""What stands around the code agrees with itself: pins, environments, wheel, Binder, pre-commit, Makefile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def requirements(*extras: str) -> list[Requirement]:
    """Direct dependencies, with those of the extras; references of labkit to its own extras left out."""
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    return [req for req in map(Requirement, lines) if req.name != "labkit"]


def pins(python: str) -> dict[str, str]:
    """constraints.txt as pip reads it under one Python: {canonical name: version}."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            environment = {"python_version": python, "python_full_version": f"{python}.9"}
            if pin.marker is None or pin.marker.evaluate(environment):
                name = canonicalize_name(pin.name)
                assert name not in found, f"{name} is pinned twice for Python {python}"
                (specifier,) = pin.specifier
                assert specifier.operator == "==", line
                found[name] = specifier.version
    return found


@pytest.mark.parametrize("python", PYTHONS)
def test_every_direct_dependency_is_pinned_within_its_floor(python):
    pinned = pins(python)
    for req in requirements(*EXTRAS):
        is_for_another_python = req.marker and not req.marker.evaluate({"python_version": python})
        if is_for_another_python or req.name == "triton":  # torch's CUDA builds each name the one Triton they go with
            continue
        version = pinned.get(canonicalize_name(req.name))
        assert version, f"{req.name} has no pin: renew constraints.txt"
        assert req.specifier.contains(version), f"{req.name}=={version} is outside {req.specifier}"


def test_python_versions_agree():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    tested = workflow["jobs"]["unit"]["strategy"]["matrix"]["python"]
    assert (tested[0], tested[-1]) == (PYTHONS[0], PYTHONS[-1])
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


@pytest.mark.parametrize("file", ["environment.yml", "binder/environment.yml"])
def test_conda_environments_hold_what_labkit_needs(file):
    entries = [
        entry
        for entry in yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))["dependencies"]
        if isinstance(entry, str)
    ]
    conda_name = {
        "torch": "pytorch-cpu" if file.startswith("binder") else "pytorch",
        "huggingface-hub": "huggingface_hub",
    }
    for req in requirements("lab", "jupyter"):
        if req.marker:  # only on Pythons older than the environment's
            continue
        assert f"{conda_name.get(req.name, req.name)}{req.specifier}" in entries, f"{file} lacks {req}"
    assert "python=3.11" in entries


def test_pre_commit_runs_the_pinned_tools():
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    used = re.findall(r"additional_dependencies: \[([\w-]+)==([\w.]+)\]", text)
    assert {name for name, _ in used} == {"ruff", "nbstripout"}
    assert all(pins("3.11")[name] == version for name, version in used)


def test_no_index_is_hard_wired():
    """Which package index is used is the user's business: pip's own settings decide."""
    files = ["Makefile", "constraints.txt", "pyproject.toml", "environment.yml", ".ci/run", ".github/workflows/ci.yml"]
    for name in [*files, "binder/environment.yml", "binder/postBuild"]:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"--(extra-)?index-url|--find-links|--trusted-host|https?://\S*simple", text), name


def test_the_wheel_carries_the_data(tmp_path):
    """An installed labkit finds its prompts; tests and notebooks stay out of the wheel."""
    pytest.importorskip("hatchling", reason="the build back-end is a test dependency: pip install -e .[test]")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    assert not [name for name in names if name.split("/")[0] in {"tests", "notebooks", "benchmarks", "docs"}]
    assert any(name.endswith("licenses/LICENSE") for name in names)
    code = "from labkit.prompts import ready_prompts; import labkit; print(labkit.__file__, len(ready_prompts()))"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    where, n_prompts = done.stdout.split()
    assert Path(where).is_relative_to(site)
    assert int(n_prompts) >= 8


@pytest.mark.skipif(sys.platform == "win32", reason="repo2docker does not run on Windows")
def test_repo2docker_accepts_the_binder_folder(tmp_path):
    shutil.copytree(ROOT / "binder", tmp_path / "binder")
    for name in ("pyproject.toml", "environment.yml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "-m", "repo2docker", "--no-build", "--debug", "--json-logs", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    dockerfile = done.stdout + done.stderr
    assert 'env update -p ${NB_PYTHON_PREFIX} --file "binder/environment.yml"' in dockerfile
    assert "RUN ./binder/postBuild" in dockerfile
    assert 'R2D_ENTRYPOINT="${REPO_DIR}/binder/start"' in dockerfile


def test_binder_scripts_are_executable_and_hand_over():
    assert (ROOT / "binder/start").read_text(encoding="utf-8").rstrip().endswith('exec "$@"')
    if sys.platform != "win32":
        assert all(os.access(ROOT / "binder" / name, os.X_OK) for name in ("postBuild", "start"))
