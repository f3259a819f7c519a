from __future__ import annotations

import pytest
import torch

from labkit.kvcache import blocks
from labkit.kvcache.reader import compile_cpu_kernel, make_reader

torch.set_num_threads(1)  # the tensors here are small, and test processes run side by side


@pytest.fixture(params=["kernel", "torch"])
def reading(request, monkeypatch):
    """Attention on the stored form by the compiled kernel, and by PyTorch where there is none."""
    if request.param == "kernel":
        kernel, reason = compile_cpu_kernel().result()
        assert kernel is not None, reason
        monkeypatch.setattr(blocks, "make_reader", make_reader)
    else:
        monkeypatch.setattr(blocks, "make_reader", lambda cache: (None, "this test reads with PyTorch"))
    return request.param
