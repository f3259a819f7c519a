"""What a million tokens cost in memory and arithmetic, from a model's config in closed form: lesson 12's figures.

    latent      S (L + R + D^I)                                   numbers a layer
    compressed  (window + S / m) D  +  S / m D^I with an indexer

``cache_nbytes`` leaves out what does not grow with S and is small: open blocks, and the room to roll back. In low
precision a row is laid out as the released kernels lay it: fp8 numbers, their scales, and the turned dims in bf16.
"""

from __future__ import annotations

from typing import Any

from labkit.model.config import CompressedAttention, GroupedAttention, LatentAttention, ModelConfig, MoEFFN
from labkit.perf.attention_cost import attention_work
from labkit.perf.weights import layer_weights, weights_of

FP4, FP8, BF16, FP32 = 0.5, 1.0, 2.0, 4.0
"""Weights of a FLOP by its format, as if a number twice as wide took twice the time. Inferred: with them, and with the
formats in ``_format_of``, V4 takes the published 27 % and 10 % of V3.2. No source states how these were counted."""


def cache_nbytes(config: ModelConfig, n_tokens: int, *, low_precision: bool = False) -> float:
    """Bytes of the rows of one sequence, in bf16 or in the released low-precision layout (DeepSeek's kinds only)."""
    return sum(_layer_nbytes(layer.attention, n_tokens, low_precision) for layer in config.layers)


def _layer_nbytes(attention: Any, n_tokens: int, low: bool) -> float:
    if isinstance(attention, GroupedAttention):
        if low:
            raise ValueError("no low-precision layout was released for grouped attention: count it in bf16.")
        kept = n_tokens if attention.window is None else min(n_tokens, attention.window)
        return 2.0 * attention.n_kv_heads * attention.d_head * 2 * kept
    indexer = attention.indexer.d_head if attention.indexer else 0
    if isinstance(attention, LatentAttention):
        # fp8 with a float32 scale for every 128 numbers, the turned key in bf16; the indexer's key with one scale.
        low_row = (
            attention.d_latent + 4 * (attention.d_latent // 128) + 2 * attention.d_rope + (indexer and indexer + 4)
        )
        return n_tokens * (low_row if low else 2.0 * (attention.d_latent + attention.d_rope + indexer))
    straight = attention.d_head - attention.d_rope
    # fp8 with a one-byte scale for every 64 numbers (padded to 8), the turned dims in bf16; the indexer's in fp4.
    row = straight + 2 * attention.d_rope + -(-(straight // 64) // 8) * 8 if low else 2.0 * attention.d_head
    index_row = (indexer / 2 + 4 if low else 2.0 * indexer) if indexer else 0.0
    n_rows = n_tokens // attention.rate if attention.rate else 0
    return (min(n_tokens, attention.window) + n_rows) * row + n_rows * index_row


def grouped_like(config: ModelConfig, n_kv_heads: int = 8, d_head: int = 128) -> float:
    """Bytes a token of the comparison that articles make: as many layers of bf16 GQA."""
    return 2.0 * n_kv_heads * d_head * 2 * config.n_layers


def decode_flops(config: ModelConfig, n_tokens: int, *, weighted: bool = False) -> dict[str, float]:
    """FLOPs of one token after ``n_tokens - 1``: {"linear", "attention", "indexer"}. A visited expert counts, others do
    not; the input embedding is a lookup. ``weighted``: each by its format (FP4, FP8, BF16, FP32 above), inferred."""
    found = {"linear": 0.0, "attention": 0.0, "indexer": 0.0}
    is_v4 = any(isinstance(layer.attention, CompressedAttention) for layer in config.layers)
    made: dict[Any, dict[str, float]] = {}
    for layer in config.layers:
        if layer not in made:
            work = attention_work(layer.attention, n_new=1, n_past=n_tokens - 1, dtype="bf16")
            linear = 0.0
            for weight in layer_weights(config, layer):
                if weight.kind in ("linear", "stacked", "expert"):
                    share = 1.0
                    if weight.kind == "expert" and isinstance(layer.ffn, MoEFFN):
                        share = layer.ffn.n_active / layer.ffn.n_experts
                    per = _format_of(weight.name, weight.kind, is_v4) if weighted else 1.0
                    linear += 2.0 * weight.n_values * share * per
            made[layer] = {
                "linear": linear,
                "attention": work.core_flops * (BF16 if weighted else 1.0),
                "indexer": work.index_flops * ((FP4 if is_v4 else FP8) if weighted else 1.0),
            }
        for name, flops in made[layer].items():
            found[name] += flops
    head = next(w for w in weights_of(config) if w.kind == ("embedding" if config.tied_embeddings else "head"))
    found["linear"] += 2.0 * head.n_values * (BF16 if weighted else 1.0)
    return found


def _format_of(name: str, kind: str, is_v4: bool) -> float:
    if "compressor" in name:
        return FP32
    if kind == "stacked" or (is_v4 and "q_b_proj" in name and "indexer" not in name):
        return BF16
    return FP4 if kind == "expert" and is_v4 else FP8
