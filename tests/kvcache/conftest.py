from __future__ import annotations

import pytest
import torch

from labkit.kvcache.blocks import BlockCache
from labkit.kvcache.reader import compile_cpu_kernel

torch.set_num_threads(1)  # the tensors here are small, and test processes run side by side


@pytest.fixture(params=["kernel", "torch"])
def reading(request, monkeypatch):
    """Attention on the stored form by the compiled kernel, and by PyTorch where there is none."""
    if request.param == "kernel":
        kernel, reason = compile_cpu_kernel().result()
        assert kernel is not None, reason
        really = BlockCache._reserve
        monkeypatch.setattr(BlockCache, "_reserve", lambda cache: cache.read_by_kernel() or really(cache))
    return request.param
