"""The kinds of attention by name, for those who compare them: MHA, MQA, GQA, sliding window.

A kind belongs to a model's config, because the weights must fit it: W_k of a model with 3 KV heads cannot serve 9.
So a component's ``build(config, like=attention)`` makes the *config* of that kind for a model of the same size, to
count its cache or to run it with random weights; it is no switch of a trained model, and ``why_not`` says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from labkit.model.config import GroupedAttention, ModelConfig
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


def kind_of(attention: GroupedAttention) -> str:
    """The registered name of a layer's kind.

    >>> kind_of(GroupedAttention(n_heads=9, n_kv_heads=3, d_head=64))
    'gqa'
    """
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
