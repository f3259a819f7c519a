"""Rotary settings of a checkpoint, old spelling (``rope_theta``, ``rope_scaling``) and new (``rope_parameters``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from labkit.checkpoint.settings import Settings, as_number, refuse_unknown
from labkit.model.config import Rope, RopeScaling

_SPEC = frozenset(
    (
        "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
        "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
        "mscale_all_dim", "truncate", "short_factor", "long_factor",
        "short_mscale", "long_mscale",  # Phi-3's own spelling, which transformers leaves to attention_factor
        "finetuned",
    )
)  # fmt: skip
_LAYER_TYPES = frozenset(("full_attention", "sliding_attention"))
KINDS = ("linear", "dynamic", "yarn", "llama3", "longrope")


def rope_from(settings: Settings, d_head: int, *, layer_type: str | None = None, theta: float = 10_000.0) -> Rope:
    """The ``Rope`` of one layer type (Gemma 3 has two); ``theta`` is the family's default base."""
    spec = settings.table("rope_parameters") or settings.table("rope_scaling")
    settings.decided("rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    if layer_type is not None and isinstance(spec.get(layer_type), dict):
        spec = spec[layer_type]
    refuse_unknown(set(spec) - _SPEC - _LAYER_TYPES, spec, "config: a rotary scaling")
    base = spec.get("rope_theta")
    base = as_number("rope_theta", base) if base is not None else settings.number("rope_theta", theta)
    share = spec.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0))
    rotary_dims = int(d_head * as_number("partial_rotary_factor", share))
    if not 2 <= rotary_dims <= d_head or rotary_dims % 2:
        raise ValueError(f"config: {rotary_dims} rotary dimensions of a head of {d_head}: must be even and fit.")
    return Rope(
        theta=base,
        rotary_dims=None if rotary_dims == d_head else rotary_dims,
        scaling=_scaling(settings, spec, rotary_dims),
    )


def _scaling(settings: Settings, spec: dict[str, Any], rotary_dims: int) -> RopeScaling | None:
    kind = spec.get("rope_type", spec.get("type", "default"))
    if kind == "su":  # Phi-3's first name for it
        kind = "longrope"
    if kind in (None, "default"):
        return None
    if kind not in KINDS:
        raise ValueError(f"rotary scaling {kind!r} is not supported: labkit knows {', '.join(KINDS)}.")

    context = settings.count("max_position_embeddings")
    original = settings.get("original_max_position_embeddings", spec.get("original_max_position_embeddings", context))
    original = int(as_number("original_max_position_embeddings", original))
    stated = spec.get("factor")
    factor = context / original if stated is None else as_number("factor", stated)

    if kind == "linear":
        return RopeScaling("linear", factor=factor, original_context=original)
    if kind == "dynamic":
        return RopeScaling("dynamic", factor=factor, original_context=context)
    if kind == "llama3":
        low, high = (as_number(key, spec.get(key)) for key in ("low_freq_factor", "high_freq_factor"))
        return RopeScaling("llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        return RopeScaling(
            "yarn",
            factor,
            original,
            beta_fast=as_number("beta_fast", spec.get("beta_fast") or 32.0),
            beta_slow=as_number("beta_slow", spec.get("beta_slow") or 1.0),
            attention_factor=_yarn_attention_factor(spec, factor),
            truncate=bool(spec.get("truncate", True)),
        )
    attention_factor = spec.get("attention_factor")
    if attention_factor is None:
        # LongRoPE (arXiv 2402.13753): sqrt(1 + ln(factor) / ln(original context))
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        "longrope",
        factor,
        original,
        attention_factor=as_number("attention_factor", attention_factor),
        short_factors=_factors("short_factor", spec.get("short_factor"), rotary_dims),
        long_factors=_factors("long_factor", spec.get("long_factor"), rotary_dims),
    )


def _yarn_attention_factor(spec: dict[str, Any], factor: float) -> float:
    """YaRN's temperature, 0.1 m ln(factor) + 1 (arXiv 2309.00071, eq. 22), with DeepSeek's two mscales."""
    if spec.get("attention_factor") is not None:
        return as_number("attention_factor", spec["attention_factor"])

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all = spec.get("mscale"), spec.get("mscale_all_dim")
    if mscale and mscale_all:
        return temperature(as_number("mscale", mscale)) / temperature(as_number("mscale_all_dim", mscale_all))
    return temperature(1.0)


def _factors(key: str, values: Any, rotary_dims: int) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != rotary_dims // 2:
        raise ValueError(f"config: {key} must list {rotary_dims // 2} numbers, one for each rotary pair.")
    return tuple(as_number(key, value) for value in values)


def usable_context(settings: Settings, rope: Rope | None) -> int:
    """The longest sequence: what the config states, or what YaRN or dynamic NTK stretch it to."""
    stated = settings.count("max_position_embeddings")
    scaling = rope.scaling if rope else None
    if scaling is not None and scaling.kind in ("yarn", "dynamic"):
        return max(stated, int(scaling.original_context * scaling.factor))
    return stated
