"""Whose products take a prompt through the layers: the compiled ones, or PyTorch's. Measured, once a form of weights.

PyTorch's depend on the processor: with bfloat16 or int8 instructions (AMX, AVX-512) they outrun the compiled ones,
without them they take ten times as long. A list of instruction sets would age; a measurement takes milliseconds.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from labkit.kernels.cpu import linear, plan

N_TOKENS, N_ROUNDS = 64, 3
MARGIN = 1.5
"""PyTorch must be faster by this much: between the products it does more, operation by operation."""
SMALL = 100_000
"""A matrix of fewer weights says nothing of products: the calls themselves would be timed."""
_found: dict[tuple[Any, ...], bool] = {}


def torch_is_faster(transformer: Any, n_threads: int) -> bool:
    """Whether a prompt is better fed through the model's own forward than through the compiled prefill."""
    module = transformer.layers[0].ffn.up_proj
    if module.in_features * module.out_features < SMALL:
        return False
    form = (getattr(module, "kind", ""), getattr(module, "round_tokens", False), transformer.dtype, n_threads)
    if form not in _found:
        ours, theirs = _seconds(module, transformer.dtype, n_threads)
        _found[form] = theirs * MARGIN < ours
    return _found[form]


def _seconds(module: Any, dtype: torch.dtype, n_threads: int) -> tuple[float, float]:
    """The best times of one product of 64 tokens: compiled, PyTorch's."""
    x = torch.randn(N_TOKENS, module.in_features, dtype=dtype)
    row = plan.describe(module)
    ours, theirs = [], []
    with torch.inference_mode():
        for _ in range(N_ROUNDS):
            began = time.perf_counter()
            with linear.compiled_products(n_threads):
                linear.multiply(row, x, None)
            between = time.perf_counter()
            module(x)
            ours.append(between - began)
            theirs.append(time.perf_counter() - between)
    return min(ours), min(theirs)
