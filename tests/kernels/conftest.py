"""Every test here waits for the compiled step, and keeps prompts on it."""

from __future__ import annotations

import pytest

from labkit import backends
from labkit.kernels.cpu import choice
from labkit.kernels.cpu.compilation import compilation


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert backends.prepare("fused"), compilation().reason


@pytest.fixture(autouse=True)
def prompts_stay_compiled(monkeypatch):
    """Also where PyTorch's products happen to be faster: the compiled prefill is what is tested here."""
    monkeypatch.setattr(choice, "torch_is_faster", lambda *_: False)
