"""The Triton kernels equal plain PyTorch: in Triton's interpreter on any machine, on the device where there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).with_name("triton_cases.py")
COMPILE = Path(__file__).with_name("triton_compile.py")
N_CASES = 16
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (pip install triton, Linux only)"
)


def run(device, **variables):
    done = subprocess.run(
        [sys.executable, str(CASES), device],
        capture_output=True,
        text=True,
        timeout=1100,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return [line.split()[0] for line in done.stdout.splitlines()]


@needs_triton
@pytest.mark.timeout(1200)  # three minutes on a quiet machine
def test_every_kernel_in_the_interpreter():
    assert len(run("cpu", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")) == N_CASES


@needs_triton
@pytest.mark.parametrize("capability", ["75", "90"])  # a T4, and what may launch a kernel before the last has ended
def test_every_kernel_compiles_for_a_gpu_that_is_not_here(capability, tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(COMPILE), capability], capture_output=True, text=True, timeout=280, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = {
        "_project",
        "_gated",
        "_attend",
        "_unpack",
        "_lookup",
        "_best",
        "_rotate_append",
        "_rms_norm",
        "_gate",
        "_many",
    }
    assert wanted <= set(done.stdout.split())


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_every_kernel_on_the_gpu():
    assert len(run("cuda")) == N_CASES
