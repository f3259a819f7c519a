"""The Triton kernel equals attention written out. Without a GPU it runs in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kvcache.drive import BLOCKED, Driver, build, layer


def test_in_the_interpreter():
    """In its own process: Triton reads TRITON_INTERPRET once, at import."""
    pytest.importorskip("triton", reason="Triton is made for Linux; nothing to interpret here")
    script = Path(__file__).with_name("triton_interpreted.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("equal\n")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", BLOCKED)
def test_on_the_gpu(name):
    driver = Driver(build(name, [layer(2, 64)], device="cuda"), n_heads=8)
    for n in (100, 1, 4, 1):
        driver.step(n)
    assert driver.worst < (0.03 if "int8" in name else 0.4 if "int4" in name else 1e-4)
