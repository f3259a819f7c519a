"""Whose products take a prompt through the layers: the compiled ones, or PyTorch's. Measured, for each form of weights.

PyTorch's depend on the processor: with bfloat16 instructions (AMX, AVX-512) they outrun the compiled ones,
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
N_WINS = 3
"""Runs in which PyTorch must be found faster before it takes prompts: one measurement may fall into a bad moment."""
_wins: dict[tuple[Any, ...], int] = {}
"""By form of weights: how often PyTorch was faster; -1 once it was not, and nothing more is measured."""


def torch_is_faster(transformer: Any, n_threads: int) -> bool:
    """Whether a prompt is better fed through the model's own forward than through the compiled prefill."""
    layer = transformer.layers[0]
    module = getattr(layer.ffn, "up_proj", layer.attention.q_proj)  # a mixture's experts are not linears
    if module.in_features * module.out_features < SMALL:
        return False
    form = (getattr(module, "kind", ""), getattr(module, "round_tokens", False), transformer.dtype, n_threads)
    if 0 <= _wins.get(form, 0) < N_WINS:
        ours, theirs = _seconds(module, transformer.dtype, n_threads)
        _wins[form] = _wins.get(form, 0) + 1 if theirs * MARGIN < ours else -1
    return _wins[form] == N_WINS


def _seconds(module: Any, dtype: torch.dtype, n_threads: int) -> tuple[float, float]:
    """The best times of one product of 64 tokens: compiled, PyTorch's. Not in turn: PyTorch's threads look for more
    work for a while after each product, on the cores that the other's need."""
    x = torch.randn(N_TOKENS, module.in_features, dtype=dtype)
    row = plan.describe(module)
    ours, theirs = [], []
    with torch.inference_mode():
        with linear.compiled_products(n_threads):
            for _ in range(N_ROUNDS):
                began = time.perf_counter()
                linear.multiply(row, x, None)
                ours.append(time.perf_counter() - began)
        with linear.compiled_products(0):
            for _ in range(N_ROUNDS):
                began = time.perf_counter()
                module(x)
                theirs.append(time.perf_counter() - began)
    return min(ours), min(theirs)
