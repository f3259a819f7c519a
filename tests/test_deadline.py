"""A test that does not end, or that ends its process, is named; the run comes to its end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

DEAF = """
import ctypes, signal

def test_deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    ctypes.PyDLL(None).sleep(100)  # holds Python's lock
"""
RUN = "import sys, pytest, tests.deadline as it; it.GRACE_S = 1.0; sys.exit(pytest.main(sys.argv[1:]))"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no signals")


def run(folder, *options):
    (folder / "pytest.ini").write_text("[pytest]\ntimeout = 1\n")
    plugins = ("-p", "pytest_timeout", "-p", "xdist", "-p", "tests.deadline", "-c", str(folder / "pytest.ini"))
    command = [sys.executable, "-c", RUN, *plugins, *options, str(folder)]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=alone)


def test_machine_code_that_does_not_end_is_ended_and_shown(tmp_path):
    (tmp_path / "test_it.py").write_text(DEAF)
    done = run(tmp_path)
    assert done.returncode == 1
    assert "in test_deaf" in done.stderr


def test_a_wait_that_does_not_end_fails_and_the_others_are_run(tmp_path):
    (tmp_path / "test_it.py").write_text("import time\ndef test_wait(): time.sleep(100)\ndef test_next(): pass\n")
    assert "1 failed, 1 passed" in run(tmp_path).stdout


def test_what_ends_a_worker_is_named_and_the_run_ends(tmp_path):
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text("import os\ndef test_1(): pass\ndef test_2(): os._exit(1)\n")
    done = run(tmp_path, "-n", "2", "--dist", "loadscope")
    assert done.returncode == 2
    assert "::test_2 ended its worker process" in done.stdout
