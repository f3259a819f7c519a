"""Round to nearest: each weight to the closest point of its grid, nothing else asked.

No calibration text, a second or two for a small model, and the baseline that GPTQ and AWQ must beat.

The head and a tied embedding hold a fifth of SmolLM2-135M's weights and choose among 49,152 words by small margins:
int4 keeps them in int8 unless told otherwise, as the default model's own file does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from labkit.quant import grid
from labkit.quant.linear import Int4Linear, Int8Linear, PackedEmbedding, PackedLinear
from labkit.registry import option, register

KEPT = ("router", "shared_gate")
"""Linears that stay as they are: they decide where tokens go, and are tiny."""


@dataclass(frozen=True)
class Int8:
    """Per-channel symmetric int8."""


@dataclass(frozen=True)
class W8A8(Int8):
    """int8 weights that meet activations in bytes where many tokens go through together (prefill).

    64 neighbouring activations of a token share a step. Its price: perplexity +1.5 % on SmolLM2-135M, where int8
    weights alone cost +0.5 % (``benchmarks/weights.py``).
    """


@dataclass(frozen=True)
class Int4:
    """Grouped int4. ``group_size`` must divide every layer's inputs (576 = 9 * 64: 32 or 64 on SmolLM2)."""

    group_size: int = option(64, choices=grid.GROUP_SIZES, help="weights that share a scale")
    symmetric: bool = option(False, choices=(False, True), help="zero point fixed at 8, not stored")
    head: str = option("int8", choices=("int8", "int4"), help="how the head and a tied embedding are held")


def to_int8(linear: nn.Linear) -> Int8Linear:
    return Int8Linear(*grid.round_int8(linear.weight), linear.bias)


def to_w8a8(linear: nn.Linear) -> Int8Linear:
    return Int8Linear(*grid.round_int8(linear.weight), linear.bias, round_tokens=True)


def to_int4(linear: nn.Linear, config: Int4) -> Int4Linear:
    q, scales, zeros = grid.round_int4(linear.weight, config.group_size, symmetric=config.symmetric)
    return Int4Linear(q, scales, zeros, linear.bias)


def replace_linears(
    transformer: Any, convert: Callable[[str, nn.Linear], PackedLinear], head: Callable[[nn.Linear], PackedLinear]
) -> Any:
    """Swap every linear of the layers for ``convert(name, linear)``, and the head (with a tied embedding) too, in
    place. What every way of choosing the integers ends with. Returns the transformer."""
    for name, module in list(transformer.layers.named_modules()):
        parent_name, _, leaf = name.rpartition(".")
        if isinstance(module, nn.Linear) and leaf not in KEPT:
            setattr(transformer.layers.get_submodule(parent_name), leaf, convert(name, module))
    if transformer.head is not None:
        transformer.head = head(transformer.head)
    else:
        dtype = transformer.dtype
        tied = nn.Linear(*reversed(transformer.embedding.weight.shape), bias=False, device="meta")
        tied.weight = transformer.embedding.weight
        transformer.head = head(tied)
        transformer.embedding = PackedEmbedding(transformer.head, dtype)
    return transformer


@register("weights", "int8", config=Int8, summary="8 bits a weight, one scale a channel, rounded to nearest")
def build_int8(config: Int8, *, transformer: Any) -> Any:
    return replace_linears(transformer, lambda name, linear: to_int8(linear), to_int8)


@register("weights", "w8a8", config=W8A8, summary="int8, and in prefill the activations are rounded to 8 bits too")
def build_w8a8(config: W8A8, *, transformer: Any) -> Any:
    return replace_linears(transformer, lambda name, linear: to_w8a8(linear), to_int8)


@register("weights", "int4", config=Int4, summary="4 bits a weight, one scale a group, rounded to nearest")
def build_int4(config: Int4, *, transformer: Any) -> Any:
    head = to_int8 if config.head == "int8" else lambda linear: to_int4(linear, config)
    return replace_linears(transformer, lambda name, linear: to_int4(linear, config), head)
