"""A prompt on a GPU: large matrix products, and Triton where plain PyTorch would make several trips to memory.

The reference's phases, in its order: norms and gates in one pass; keys are turned on their way into the cache, which
counts as attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.backends.step import Rows, pick
from labkit.kernels import ops
from labkit.kernels.triton import elementwise, many
from labkit.kernels.triton.product import Matrix
from labkit.kernels.triton.unpack import unpack


def prefill(
    transformer: Any, cache: Any, token_ids: Tensor, *, rows: Rows, timer: Any, should_stop: Callable[[], bool]
) -> Tensor:
    """``token_ids`` (T,), the next of the cache's one sequence, through all layers: the hidden states of ``rows``."""
    config = transformer.config
    with timer("embed"):
        step = transformer.open(cache, len(token_ids), timer, should_stop)
        x = transformer.embedding(token_ids)
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
    (segment,) = cache.segments
    slot = cache.slot_of(segment.sequence_id)
    for layer_idx, (block, layer) in enumerate(zip(transformer.layers, config.layers, strict=True)):
        timer.layer = layer_idx
        step.check()
        with timer("norm"):
            normed = norm(block.attention_norm, x)
        with timer("attention"):
            keys, values = (cache.store[layer_idx][name][slot] for name in ("k", "v"))
            x = _attention(block.attention, layer.attention, x, normed, step, segment, keys, values)
        with timer("norm"):
            normed = norm(block.ffn_norm, x)
        with timer("ffn"):
            gated = elementwise.gate(linear(block.ffn.gate_proj, normed), linear(block.ffn.up_proj, normed))
            x = linear(block.ffn.down_proj, gated, add_to=x)
    timer.layer = -1
    x = pick(rows, cache, x)
    cache.commit()
    return x


def norm(module: Any, x: Tensor) -> Tensor:
    return elementwise.rms_norm(x, module.weight, module.eps, unit_offset=module.unit_offset)


def linear(module: Any, x: Tensor, *, add_to: Tensor | None = None) -> Tensor:
    """x W^T + b for many tokens (+ ``add_to``); packed weights are unpacked first, a file's own blocks within
    the product, and none where tokens are to be rounded."""
    if getattr(module, "round_tokens", False):
        rounded = module(x)
        return rounded if add_to is None else add_to + rounded
    matrix = Matrix.of(module)
    if matrix.in_blocks:
        return many.linear(matrix, x, add_to=add_to)
    weight = matrix.weight if matrix.kind == 16 else unpack(matrix, x.dtype)
    if add_to is None:
        return F.linear(x, weight, matrix.bias)
    added = torch.addmm(add_to, x, weight.t())
    return added if matrix.bias is None else added + matrix.bias


def _attention(
    part: Any, kind: Any, x: Tensor, normed: Tensor, step: Any, segment: Any, keys: Tensor, values: Tensor
) -> Tensor:
    """x + W_o attention(normed), its keys and values left in the cache's (G, capacity, D)."""
    n_tokens = len(normed)
    q = linear(part.q_proj, normed).view(n_tokens, kind.n_heads, kind.d_head)
    k = linear(part.k_proj, normed).view(n_tokens, kind.n_kv_heads, kind.d_head)
    v = linear(part.v_proj, normed).view(n_tokens, kind.n_kv_heads, kind.d_head)
    if kind.qk_norm == "head":
        q, k = norm(part.q_norm, q), norm(part.k_norm, k)
    cos, sin = step.angles(kind.rope, kind.d_head, torch.float32)
    q = elementwise.rotate_append(q, k, v, cos, sin, step.positions, keys, values, layout=kind.rope.layout)
    n = segment.n_total
    out = ops.attend(
        q, keys[:, :n], values[:, :n], n_past=segment.n_past, scale=part.scale, window=kind.window,
        n_sinks=kind.n_sinks, softcap=kind.softcap,
    )  # fmt: skip
    return linear(part.o_proj, out.reshape(n_tokens, -1), add_to=x)
