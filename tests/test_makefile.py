"""The two commands, driven with a stand-in Python that writes down what it was asked to do: no network, no waiting."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or shutil.which("make") is None, reason="needs make and a POSIX shell"
)

STAND_IN = """#!/bin/sh
echo "$@" >> "$LABKIT_CALLS"
case "$*" in
  *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *"$LABKIT_FAIL"*) [ -z "$LABKIT_FAIL" ] || exit 1 ;;
esac
"""


@pytest.fixture
def clone(tmp_path):
    """A folder with the Makefile and what it reads, and ``python3`` replaced by the stand-in."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "notebooks").mkdir()
    python = tmp_path / "stand-in" / "python3"
    python.parent.mkdir()
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return tmp_path


def make(clone: Path, *arguments: str, fail: str = "") -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run make; returns what it did and the calls that Python received."""
    calls = clone / "calls.txt"
    calls.write_text("")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    environment |= {"LABKIT_CALLS": str(calls), "LABKIT_FAIL": fail, "CI": ""}
    environment["PATH"] = f"{clone / 'stand-in'}{os.pathsep}{environment['PATH']}"
    command = ["make", "--no-print-directory", *arguments]
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
    return done, calls.read_text().splitlines()


def test_lab_sets_up_fetches_and_opens(clone):
    done, calls = make(clone, "lab")
    assert done.returncode == 0, done.stderr
    assert "Creating .venv" in done.stdout
    assert "Installing labkit" in done.stdout
    calls = [call for call in calls if not call.startswith(("-c", "--version"))]
    assert calls[0] == "-m venv .venv"
    assert calls[1].startswith("-m pip install")
    assert "-c constraints.txt" in calls[1]
    assert calls[1].endswith("-e .[jupyter]")
    assert calls[2:] == ["-m labkit.cli prepare", "-m labkit.cli lab"]


def test_a_second_lab_installs_nothing(clone):
    make(clone, "lab")
    done, calls = make(clone, "lab", "ARGS=--no-browser")
    assert calls == ["-m labkit.cli prepare", "-m labkit.cli lab --no-browser"]
    assert "Installing" not in done.stdout


def test_test_includes_what_lab_needs(clone):
    _, calls = make(clone, "test")
    assert next(call for call in calls if "pip install" in call).endswith("-e .[dev]")
    parts = [call for call in calls if call.startswith("-m pytest")]
    assert ["not browser" in parts[0], "--nbval-lax" in parts[1], "-m browser" in parts[2]] == [True] * 3
    for target in ("test", "lab"):
        _, calls = make(clone, target)
        assert not [call for call in calls if "pip" in call], target


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints.txt"])
def test_changed_pins_install_again(clone, file):
    make(clone, "lab")
    (clone / file).write_text((clone / file).read_text() + "\n# changed\n")
    _, calls = make(clone, "lab")
    assert any("pip install" in call for call in calls)
    _, calls = make(clone, "lab")
    assert not any("pip install" in call for call in calls)


def test_an_interrupted_install_is_done_again(clone):
    done, calls = make(clone, "lab", fail="pip install")
    assert done.returncode != 0
    assert not any("labkit.cli" in call for call in calls)
    _, calls = make(clone, "lab")
    assert any("pip install" in call for call in calls)


def test_every_part_runs_and_a_failure_fails_the_whole(clone):
    done, calls = make(clone, "test", fail="not browser")
    assert done.returncode != 0
    assert len([call for call in calls if call.startswith("-m pytest")]) == 3
    assert "Something failed" in done.stdout


def test_pip_flags_reach_pip(clone):
    _, calls = make(clone, "lab", "PIP_FLAGS=--no-cache-dir")
    assert "--no-cache-dir" in next(call for call in calls if "pip install" in call)


def test_no_python_says_what_to_do(clone):
    done, _ = make(clone, "lab", "PYTHON=no-such-python")
    assert done.returncode != 0
    assert "No usable Python as 'no-such-python'" in done.stderr
    assert "PYTHON=" in done.stderr


def test_a_missing_venv_module_says_what_to_install(clone):
    python = clone / "stand-in" / "python3"
    python.write_text("#!/bin/sh\ncase \"$*\" in *'-m venv'*) exit 1 ;; esac\n")
    done, _ = make(clone, "lab")
    assert done.returncode != 0
    assert "apt install python3-venv" in done.stderr
    assert not (clone / ".venv").exists()


def test_help_comes_first(clone):
    done, calls = make(clone)
    assert "make lab" in done.stdout
    assert not calls


def test_ci_installs_only_what_is_missing_and_reports_failure(tmp_path):
    """`.ci/run` with a machine made of stand-ins: apt is asked for the missing packages and nothing else."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    programs = tmp_path / "bin"
    programs.mkdir()
    log = tmp_path / "log"
    for name in ("python3", "git", "g++", "npm", "fc-list"):
        (programs / name).write_text("#!/bin/sh\n")
    (programs / "fc-list").write_text("#!/bin/sh\necho /usr/share/fonts/DejaVuSans.ttf\n")
    (programs / "id").write_text("#!/bin/sh\necho 0\n")
    (programs / "apt-get").write_text(f'#!/bin/sh\necho "apt-get $*" >> {log}\n')
    (programs / "make").write_text(f'#!/bin/sh\necho "make $*" >> {log}\n[ "$1" != lint ]\n')
    for tool in ("bash", "dirname", "grep", "sh"):
        found = shutil.which(tool)
        assert found
        (programs / tool).symlink_to(found)
    for program in programs.iterdir():
        if not program.is_symlink():
            program.chmod(0o755)
    command = [str(programs / "bash"), str(tmp_path / ".ci/run")]
    done = subprocess.run(command, env={"PATH": str(programs)}, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr  # lint failed, and the tests ran all the same
    said = log.read_text().splitlines()
    assert said[0] == "apt-get update -qq"
    assert said[1].endswith("--no-install-recommends chromium")
    assert said[2:] == ["make lint", "make test"]


def test_a_missing_browser_is_fetched_before_its_tests_are_skipped(monkeypatch):
    from tests.browser import conftest

    asked = []

    def playwright(command, **options):
        asked.append(command[1:])
        return subprocess.CompletedProcess(command, 1, "", "Error: no network\n    at lookup {\n  errno: 1\n}\n")

    monkeypatch.setattr(subprocess, "run", playwright)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="failed: Error: no network"):
        conftest.fetch_browser()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="failed: Error: no network"):
        conftest.fetch_browser()
    assert asked == [["-m", "playwright", "install", "chromium"]] * 2
