"""Every test here waits for the compiled step."""

from __future__ import annotations

import pytest

from labkit import backends
from labkit.kernels.cpu.compilation import compilation


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert backends.prepare("fused"), compilation().reason
