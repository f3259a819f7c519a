"""The kinds of attention by name, for those who compare them: from MHA to CSA and HCA.

A kind belongs to a model's config, because the weights must fit it: W_k of a model with 3 KV heads cannot serve 9.
So a component's ``build(config, like=attention)`` makes the *config* of that kind for a model of the same size, to
count its cache or to run it with random weights; it is no switch of a trained model, and ``why_not`` says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from labkit.model.config import (
    Attention,
    CompressedAttention,
    GroupedAttention,
    Indexer,
    LatentAttention,
    ModelConfig,
    Rope,
)
from labkit.registry import find, option, register


@dataclass(frozen=True)
class GQA:
    n_kv_heads: int = option(3, low=1, high=128, step=1, help="key and value heads; must divide the query heads")


@dataclass(frozen=True)
class Sliding:
    window: int = option(512, low=1, high=131_072, step=1, help="latest tokens that a token sees, itself included")
    n_sinks: int = option(0, low=0, high=64, step=1, help="first tokens that stay visible (StreamingLLM uses 4)")


@register("attention", "mha", summary="A key and value head for each query head: the largest cache (GPT-2, Llama 2)")
def mha(config: None, *, like: GroupedAttention) -> GroupedAttention:
    return replace(like, n_kv_heads=like.n_heads, window=None, n_sinks=0)


@register("attention", "mqa", summary="One key and value head for all query heads: the smallest cache of the four")
def mqa(config: None, *, like: GroupedAttention) -> GroupedAttention:
    return replace(like, n_kv_heads=1, window=None, n_sinks=0)


@register("attention", "gqa", config=GQA, summary="Groups of query heads share a key and value head (Llama 3, Qwen)")
def gqa(config: GQA, *, like: GroupedAttention) -> GroupedAttention:
    if like.n_heads % config.n_kv_heads:
        fits = [n for n in range(1, like.n_heads + 1) if like.n_heads % n == 0]
        raise ValueError(
            f"{like.n_heads} query heads cannot share {config.n_kv_heads} key and value heads evenly: "
            f"choose one of {', '.join(map(str, fits))}."
        )
    return replace(like, n_kv_heads=config.n_kv_heads, window=None, n_sinks=0)


@register("attention", "sliding", config=Sliding, summary="Only the latest tokens are seen: the cache stops growing")
def sliding(config: Sliding, *, like: GroupedAttention) -> GroupedAttention:
    return replace(like, window=config.window, n_sinks=config.n_sinks)


@dataclass(frozen=True)
class MLA:
    d_latent: int = option(512, low=16, high=4096, step=16, help="numbers of the latent that stands for all heads")
    d_rope: int = option(64, low=8, high=256, step=8, help="numbers of the one key that carries the position")


@dataclass(frozen=True)
class DSA(MLA):
    top_k: int = option(2048, low=1, high=1 << 20, step=1, help="tokens that a query sees, chosen by an indexer")


@dataclass(frozen=True)
class CSA:
    rate: int = option(4, low=2, high=64, step=1, help="tokens in a block; each row is made of two blocks")
    window: int = option(128, low=1, high=4096, step=1, help="latest tokens that are kept uncompressed")
    top_k: int = option(512, low=1, high=1 << 20, step=1, help="rows that a query sees, chosen by an indexer")


@dataclass(frozen=True)
class HCA:
    rate: int = option(128, low=2, high=1024, step=1, help="tokens in a block, which becomes one row")
    window: int = option(128, low=1, high=4096, step=1, help="latest tokens that are kept uncompressed")


@register("attention", "mla", config=MLA, summary="One latent a token, from which every head's key and value are made")
def mla(config: MLA, *, like: GroupedAttention) -> LatentAttention:
    rope = Rope(like.rope.theta if like.rope else 10_000.0, "interleaved")
    return LatentAttention(like.n_heads, like.d_head, config.d_rope, like.d_head, config.d_latent, rope=rope)


@register("attention", "dsa", config=DSA, summary="MLA, and an indexer that chooses the tokens a query sees (V3.2)")
def dsa(config: DSA, *, like: GroupedAttention) -> LatentAttention:
    return replace(mla(config, like=like), indexer=Indexer(like.n_heads, 2 * config.d_rope, config.top_k))


@register("attention", "csa", config=CSA, summary="One row for every few tokens, and an indexer that chooses (V4)")
def csa(config: CSA, *, like: GroupedAttention) -> CompressedAttention:
    indexer = Indexer(like.n_heads, like.d_head, config.top_k)
    return replace(_compressed(like, config.window), rate=config.rate, overlap=True, indexer=indexer)


@register("attention", "hca", config=HCA, summary="One row for every 128 tokens, all of them seen (V4)")
def hca(config: HCA, *, like: GroupedAttention) -> CompressedAttention:
    return replace(_compressed(like, config.window), rate=config.rate)


def _compressed(like: GroupedAttention, window: int) -> CompressedAttention:
    """A V4 layer with the query heads of ``like``: their width, half of it turned, queries squeezed to as much."""
    n_groups = 2 if like.n_heads % 2 == 0 else 1
    width = like.n_heads * like.d_head
    rope = Rope(like.rope.theta if like.rope else 10_000.0, "interleaved", rotary_dims=like.d_head // 2)
    return CompressedAttention(like.n_heads, like.d_head, width, window, n_groups, width // n_groups, rope)


def kind_of(attention: Attention) -> str:
    """The registered name of a layer's kind.

    >>> kind_of(GroupedAttention(n_heads=9, n_kv_heads=3, d_head=64))
    'gqa'
    """
    if isinstance(attention, LatentAttention):
        return "dsa" if attention.indexer else "mla"
    if isinstance(attention, CompressedAttention):
        return "csa" if attention.indexer else "hca" if attention.rate else "sliding"
    if attention.window is not None:
        return "sliding"
    if attention.n_kv_heads == attention.n_heads:
        return "mha"
    return "mqa" if attention.n_kv_heads == 1 else "gqa"


def kinds_of(config: ModelConfig) -> tuple[str, ...]:
    """The kinds that a model's layers use, in the order they first appear: Gemma 3 has ("sliding", "gqa")."""
    return tuple(dict.fromkeys(kind_of(layer.attention) for layer in config.layers))


def why_not(config: ModelConfig, kind: str) -> str | None:
    """Why a trained model with ``config`` cannot run with another ``kind``, or None when that is what it has."""
    component, _ = find("attention", kind)
    own = kinds_of(config)
    if component.name in own:
        return None
    trained = f"this model was trained for {' and '.join(own)}"
    if component.name == "sliding":
        return f"{trained}: cutting its view to a window would change what it says."
    return f"{trained}: {component.name} needs other key and value weights."


def with_attention(config: ModelConfig, choice: Any) -> ModelConfig:
    """``config`` with every layer's attention of the chosen kind (a name or an options object), for random weights.

    Raises ValueError that lists the kinds for an unknown name, and the head counts that fit.
    """
    component, options = find("attention", choice)
    layers = tuple(replace(layer, attention=component.build(options, like=layer.attention)) for layer in config.layers)
    return replace(config, layers=layers)
