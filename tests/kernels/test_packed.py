"""The packed products as ``torch.library`` ops."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from labkit.quant import W8A8, Int4, Int8
from tests.kernels.compare import quantize
from tests.kernels.families import FAMILIES, random_model


@pytest.mark.parametrize("weights", [Int8(), W8A8(), Int4(group_size=32)], ids=str)
@pytest.mark.parametrize("shape", [(5,), (2, 5), (1,)])
def test_shapes_are_known_without_computing(weights, shape):
    linear = quantize(random_model(FAMILIES["gpt2"]), weights).layers[0].ffn.up_proj
    real = linear(torch.randn(*shape, linear.in_features))
    nothing = linear.to("meta")(torch.empty(*shape, linear.in_features, device="meta"))
    assert (nothing.shape, nothing.dtype) == (real.shape, real.dtype)


def test_the_first_product_does_not_import_pytorchs_compiler():
    """It takes seconds, in the middle of somebody's first run."""
    code = (
        "import sys, torch; from labkit.kernels import packed; "
        "packed.linear_int8(torch.ones(2, 32), torch.ones(8, 32, dtype=torch.int8), torch.ones(8), None); "
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
