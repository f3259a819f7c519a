"""How many bytes a model's weights will take, from its config alone."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from labkit.kernels import panel_layout
from labkit.quant import grid, grouped
from labkit.quant.linear import INT8_PAD


def int8_nbytes(n_out: int, n_in: int) -> int:
    """One byte a weight, inputs padded to whole vectors, one float32 scale an output."""
    return n_out * (n_in + -n_in % INT8_PAD) + 4 * n_out


def groups_nbytes(n_out: int, n_in: int, *, bits: int, group_size: int, kind: str) -> int:
    """Bytes of ``grouped.linear_of`` on a grid of ``kind``. Raises ValueError when the groups do not divide n_in.

    4 bits with whole zero points lie in panels, padded to whole panels and blocks; the others in planes."""
    grid.check_group_size(n_in, group_size)
    if bits != 4 or kind == "minimum":
        return grouped.nbytes(n_out, n_in, bits=bits, group_size=group_size, kind=kind)
    weights, scales = grid.packed_shapes(n_out, n_in, group_size)
    return prod(weights) + prod(scales) * (2 if kind == "symmetric" else 3)


def panels_nbytes(n_out: int, n_in: int, *, bits: int, group_size: int, kind: str) -> int:
    """The same once a CPU's compiled step has laid it out as panels. With 8 bits a zero point becomes a float32
    minimum: 128 is taken off the codes, and a scale times an integer is no float16. ``group_size`` n_in: a row's."""
    per_group = {"symmetric": 2, "asymmetric": 3, "minimum": 4}[kind]
    if bits == 8 and kind != "symmetric":
        per_group = 6
    return panel_layout.nbytes(n_out, n_in, bits=bits, group=group_size, group_nbytes=per_group)


def int8_panels_nbytes(n_out: int, n_in: int) -> int:
    """``int8_nbytes`` once a CPU's compiled step has laid it out."""
    return panel_layout.nbytes(n_out, n_in, bits=8, group=0, group_nbytes=4)


def linear_shapes(model_config: Any) -> Iterator[tuple[int, int, bool]]:
    """(outputs, inputs, has a bias) of every linear in the layers."""
    width = model_config.d_model
    for layer in model_config.layers:
        attention, ffn = layer.attention, layer.ffn
        yield from _attention_shapes(attention, width)
        if hasattr(ffn, "n_experts"):
            if ffn.d_ff_shared:
                yield ffn.d_ff_shared, width, False
                yield ffn.d_ff_shared, width, False
                yield width, ffn.d_ff_shared, False
            continue
        for _ in range(2 if ffn.gated else 1):
            yield ffn.d_ff, width, ffn.bias
        yield width, ffn.d_ff, ffn.bias


def _attention_shapes(attention: Any, width: int) -> Iterator[tuple[int, int, bool]]:
    if attention.kernels != "grouped":
        tensors = list(attention.tensors(width))
        biased = {name.removesuffix(".bias") for name, _, kind in tensors if kind == "bias"}
        for name, shape, kind in tensors:
            if kind == "linear":
                yield *shape, name.removesuffix(".weight") in biased
        return
    d_q, d_kv = attention.n_heads * attention.d_head, attention.n_kv_heads * attention.d_head
    yield d_q, width, attention.qkv_bias
    yield d_kv, width, attention.qkv_bias
    yield d_kv, width, attention.qkv_bias
    yield width, d_q, attention.out_bias


def kept_values(model_config: Any) -> int:
    """Numbers that stay in the model's dtype: norms, biases, positions, routers, stacked experts."""
    width, norm = model_config.d_model, model_config.norm
    times = 2 if norm.kind == "layer" and norm.bias else 1
    per_norm = width * times
    total = per_norm + (model_config.context_tokens * width if model_config.learned_positions else 0)
    total += 0 if model_config.tied_embeddings else model_config.vocab_size * width
    total += model_config.vocab_size if model_config.head_bias else 0
    if model_config.streams is not None:
        total += sum(prod(shape) for _, shape, _ in model_config.streams.tensors(width, last=True))
    for layer in model_config.layers:
        attention, ffn = layer.attention, layer.ffn
        total += per_norm * (4 if layer.norms == "sandwich" else 2)
        if layer.norms == "streams" and model_config.streams is not None:
            total += 2 * sum(prod(shape) for _, shape, _ in model_config.streams.tensors(width))
        if attention.kernels != "grouped":
            kept = [(name, shape) for name, shape, kind in attention.tensors(width) if kind != "linear"]
            total += sum(prod(shape) for name, shape in kept if not name.endswith("_proj.bias"))
        elif attention.qk_norm == "head":
            total += 2 * attention.d_head * times
        elif attention.qk_norm == "full":
            total += (attention.n_heads + attention.n_kv_heads) * attention.d_head * times
        if hasattr(ffn, "n_experts"):
            total += ffn.n_experts if ffn.gate.choice_bias else 0
            total += ffn.n_experts * width + 3 * ffn.n_experts * ffn.d_ff * width
            total += width if ffn.shared_gate else 0
    return total + sum(n_out for n_out, _, bias in linear_shapes(model_config) if bias)


def predict_nbytes(model_config: Any, config: Any, *, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of the weights once packed: what ``Model.nbytes`` will be. ``dtype`` holds what is not packed.

    Raises ValueError when the group size does not divide a layer's inputs."""
    packed: int = sum(config.layer_nbytes(n_out, n_in) for n_out, n_in, _ in linear_shapes(model_config))
    packed += config.top_nbytes(model_config.vocab_size, model_config.d_model)
    return packed + kept_values(model_config) * dtype.itemsize
