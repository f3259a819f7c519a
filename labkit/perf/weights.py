"""Every weight a model holds, from its config alone: name, shape, phase, and whether a format may pack it.

The names are ``Transformer``'s own, so a test can hold this list against the real thing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from labkit.model.config import Attention, DenseFFN, GroupedAttention, Layer, ModelConfig, MoEFFN


@dataclass(frozen=True)
class Weight:
    """One tensor. ``kind``: linear (a product's weight), stacked (one that no format packs), expert (E products, of
    which a token visits a few), bias, norm, embedding, head, table (whole numbers, four bytes each)."""

    name: str
    shape: tuple[int, ...]
    phase: str
    kind: str
    layer_idx: int | None = None

    @property
    def n_values(self) -> int:
        return prod(self.shape)


def weights_of(config: ModelConfig) -> tuple[Weight, ...]:
    """All of them, in the model's order; a tied head is not repeated."""
    d, vocab = config.d_model, config.vocab_size
    found = [Weight("embedding.weight", (vocab, d), "embed", "embedding")]
    if config.learned_positions:
        found.append(Weight("positions.weight", (config.context_tokens, d), "embed", "embedding"))
    for idx, layer in enumerate(config.layers):
        for weight in layer_weights(config, layer):
            found.append(Weight(f"layers.{idx}.{weight.name}", weight.shape, weight.phase, weight.kind, idx))
    if config.streams is not None:
        for name, shape, kind in config.streams.tensors(d, last=True):
            found.append(Weight(f"confluence.{name}", shape, "norm", kind))
    found += _norm(config, "final_norm", d, "norm")
    if not config.tied_embeddings:
        found += _linear("head", vocab, d, config.head_bias, "lm_head", kind="head")
    return tuple(found)


def n_parameters(config: ModelConfig) -> int:
    """Parameters of the model, a tied head counted once."""
    return sum(weight.n_values for weight in weights_of(config))


def layer_weights(config: ModelConfig, layer: Layer) -> Iterator[Weight]:
    """One layer's tensors, named from the layer."""
    d = config.d_model
    yield from _norm(config, "attention_norm", d, "norm")
    yield from _attention(config, layer.attention)
    yield from _norm(config, "ffn_norm", d, "norm")
    yield from _ffn(config, layer.ffn)
    if layer.norms == "sandwich":
        yield from _norm(config, "attention_post_norm", d, "norm")
        yield from _norm(config, "ffn_post_norm", d, "norm")
    if layer.norms == "streams" and config.streams is not None:
        for name, shape, kind in config.streams.tensors(d):
            yield Weight(f"attention_mix.{name}", shape, "norm", kind)
            yield Weight(f"ffn_mix.{name}", shape, "norm", kind)


def _attention(config: ModelConfig, attention: Attention) -> Iterator[Weight]:
    d = config.d_model
    if not isinstance(attention, GroupedAttention):
        for name, shape, kind in attention.tensors(d):
            yield Weight(f"attention.{name}", shape, "attention", kind)
        return
    d_q = attention.n_heads * attention.d_head
    d_kv = attention.n_kv_heads * attention.d_head
    yield from _linear("attention.q_proj", d_q, d, attention.qkv_bias, "attention")
    yield from _linear("attention.k_proj", d_kv, d, attention.qkv_bias, "attention")
    yield from _linear("attention.v_proj", d_kv, d, attention.qkv_bias, "attention")
    yield from _linear("attention.o_proj", d, d_q, attention.out_bias, "attention")
    if attention.qk_norm is not None:
        per_head = attention.qk_norm == "head"
        yield from _norm(config, "attention.q_norm", attention.d_head if per_head else d_q, "attention")
        yield from _norm(config, "attention.k_norm", attention.d_head if per_head else d_kv, "attention")


def _ffn(config: ModelConfig, ffn: DenseFFN | MoEFFN) -> Iterator[Weight]:
    d = config.d_model
    if isinstance(ffn, DenseFFN):
        yield from _dense("ffn", d, ffn.d_ff, ffn.gated, ffn.bias)
        return
    yield Weight("ffn.router.weight", (ffn.n_experts, d), "ffn", "linear")
    yield Weight("ffn.experts.gate", (ffn.n_experts, ffn.d_ff, d), "ffn", "expert")
    yield Weight("ffn.experts.up", (ffn.n_experts, ffn.d_ff, d), "ffn", "expert")
    yield Weight("ffn.experts.down", (ffn.n_experts, d, ffn.d_ff), "ffn", "expert")
    if ffn.d_ff_shared:
        yield from _dense("ffn.shared", d, ffn.d_ff_shared, True, False)
    if ffn.gate.choice_bias:
        yield Weight("ffn.choice_bias", (ffn.n_experts,), "ffn", "bias")
    if ffn.n_ids:
        yield Weight("ffn.experts_of_id", (ffn.n_ids, ffn.n_active), "ffn", "table")
    if ffn.shared_gate:
        yield Weight("ffn.shared_gate.weight", (1, d), "ffn", "linear")


def _dense(name: str, d: int, d_ff: int, gated: bool, bias: bool) -> Iterator[Weight]:
    if gated:
        yield from _linear(f"{name}.gate_proj", d_ff, d, bias, "ffn")
    yield from _linear(f"{name}.up_proj", d_ff, d, bias, "ffn")
    yield from _linear(f"{name}.down_proj", d, d_ff, bias, "ffn")


def _linear(name: str, d_out: int, d_in: int, bias: bool, phase: str, *, kind: str = "linear") -> list[Weight]:
    found = [Weight(f"{name}.weight", (d_out, d_in), phase, kind)]
    return [*found, Weight(f"{name}.bias", (d_out,), phase, "bias")] if bias else found


def _norm(config: ModelConfig, name: str, width: int, phase: str) -> list[Weight]:
    found = [Weight(f"{name}.weight", (width,), phase, "norm")]
    biased = config.norm.kind == "layer" and config.norm.bias
    return [*found, Weight(f"{name}.bias", (width,), phase, "norm")] if biased else found
