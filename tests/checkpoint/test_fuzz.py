"""Damaged files: a few hundred mutations each, in a process of its own with a memory limit and a deadline."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from small_files import write_folder, write_gguf

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="peak memory is read from resource.getrusage")
WORKER = Path(__file__).with_name("fuzz_worker.py")
N_MUTATIONS = 300


def run_worker(file: Path, model: Path, header_size: int, seed: int) -> dict:
    command = [sys.executable, str(WORKER), str(file), str(model), str(N_MUTATIONS), str(seed), str(header_size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"the interpreter died ({done.returncode}):\n{done.stderr[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def check(result: dict) -> None:
    assert not result["surprises"], "\n".join(result["surprises"][:20])
    assert result.get("silent", 0) == 0
    assert result.get("refused", 0) > N_MUTATIONS // 3
    assert sum(result.get(key, 0) for key in ("refused", "loaded")) == N_MUTATIONS
    # the allocator's own slack on top of twice the file
    assert result["growth_bytes"] <= 2 * result["nbytes"] + 48 * 2**20


def test_gguf(tmp_path):
    path = write_gguf(tmp_path / "model.gguf")
    from labkit.checkpoint.gguf import GGUFFile

    with GGUFFile(path) as file:
        header_size = min(info.start for info in file.tensors.values())
    check(run_worker(path, path, header_size, seed=1))


def test_safetensors(tmp_path):
    folder = write_folder(tmp_path / "model")
    path = folder / "model.safetensors"
    header_size = 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
    check(run_worker(path, folder, header_size, seed=2))


def test_config(tmp_path):
    folder = write_folder(tmp_path / "model")
    path = folder / "config.json"
    check(run_worker(path, folder, path.stat().st_size, seed=3))
