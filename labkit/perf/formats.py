"""Bytes of a weight in a format, and of a cache in its kind: asked of the rooms that own them, never copied here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from labkit import registry
from labkit.kvcache import KVCache, LayerEntries
from labkit.kvcache.sliding import Sliding
from labkit.model.attention import entries_of
from labkit.model.config import DTYPES, ModelConfig, as_dtype
from labkit.perf.weights import Weight
from labkit.quant import WeightFormat, form_of, format_of
from labkit.quant.format import KEPT


def weight_nbytes(weight: Weight, *, dtype: str, weights: Any = None, tied: bool = False) -> int:
    """Bytes of one tensor when the model is loaded with ``dtype`` and ``weights`` (None: as ``dtype``).

    A packed format holds the layers' linears and the head (with a tied embedding); routers, stacked experts, norms,
    biases and an untied embedding stay in ``dtype``. Raises ValueError for an unknown format.
    """
    plain = weight.n_values * (4 if weight.kind == "table" else as_dtype(dtype).itemsize)
    config = None if weights is None else format_of(weights)
    if not isinstance(config, WeightFormat):
        return plain
    is_head = weight.kind == "head" or (tied and weight.name == "embedding.weight")
    is_packed = weight.kind == "linear" and not any(kept in weight.name for kept in KEPT)
    if is_head:
        found = config.top_nbytes(*weight.shape)
    elif is_packed:
        found = config.layer_nbytes(*weight.shape, name=weight.name)
    else:
        found = config.table_nbytes(*weight.shape) if weight.name == "embedding.weight" else None
    return plain if found is None else found


def bytes_a_weight(weights: Any, *, dtype: str) -> float:
    """Bytes of a weight in the layers, scales included, roughly: for a trace without its model. ``weights``: a name,
    a config, a trace's label ("int4, group_size=32"), or a dtype or None for plain numbers."""
    name = weights.partition(",")[0] if isinstance(weights, str) else weights
    if name is None or name in DTYPES:
        return as_dtype(name or dtype).itemsize
    config = format_of(name)
    return config.bits_a_weight() / 8 if isinstance(config, WeightFormat) else as_dtype(dtype).itemsize


def timed_form(engine: Any) -> Any:
    """The engine that is measured in place of ``engine``: GPTQ and AWQ only choose the integers, so their layout is
    timed as round-to-nearest makes it, and nothing is ever calibrated for a forecast."""
    return replace(engine, weights=form_of(engine.weights))


def held_form(engine: Any) -> Any:
    """The weights' format whose bytes the engine comes to hold: a CPU's compiled step lays packed ones out anew."""
    compiles = engine.device == "cpu" and engine.backend in ("auto", "fused")
    config = None if engine.weights is None or not compiles else format_of(engine.weights)
    return config.compiled() if isinstance(config, WeightFormat) else engine.weights


def row_nbytes(weight: Weight, *, dtype: str, weights: Any = None, tied: bool = False) -> float:
    """Bytes of one row of a table: what looking a token up reads."""
    return weight_nbytes(weight, dtype=dtype, weights=weights, tied=tied) / weight.shape[0]


def cache_class(kv_cache: Any) -> tuple[type[KVCache], Any]:
    """The class and the config behind a cache's name or config. Raises ValueError that lists the kinds."""
    component, config = registry.find("kv_cache", kv_cache)
    for found in _subclasses(KVCache):
        if found.__dict__.get("kind") == component.name:
            return found, config
    raise ValueError(f"kv_cache {component.name!r} does not say what it will hold (no class of that kind).")


def cache_nbytes(
    config: ModelConfig, *, n_tokens: int, n_sequences: int = 1, dtype: str = "fp32", kv_cache: Any = "contiguous"
) -> int:
    """Bytes that a cache of ``n_sequences`` sequences of up to ``n_tokens`` tokens will take."""
    kind, options = cache_class(kv_cache)
    return kind.predict_nbytes(
        [entries_of(layer.attention) for layer in config.layers],
        capacity_tokens=n_tokens,
        n_sequences=n_sequences,
        dtype=as_dtype(dtype),
        config=options,
    )


def sight(attention: Any, *, kv_cache: Any = "contiguous") -> LayerEntries:
    """What a layer stores and how far it sees once the cache has had its say: a sliding cache narrows the window."""
    entries = entries_of(attention)
    _, options = cache_class(kv_cache)
    return options.layer(entries) if isinstance(options, Sliding) else entries


def layer_token_nbytes(attention: Any, *, dtype: str, kv_cache: Any = "contiguous") -> float:
    """Bytes that one token takes in one layer's cache, as long as it is kept."""
    kind, options = cache_class(kv_cache)
    if not kind.keeps_history:
        return 0.0
    # What is evicted, or capped, does not change what one token takes.
    entries = replace(entries_of(attention), window=None, n_sinks=0)
    unlimited = {"window": 0, "n_blocks": 0}
    options = options and replace(options, **{k: v for k, v in unlimited.items() if hasattr(options, k)})
    few, many = 1 << 14, 1 << 15  # multiples of every block and group size, beyond every residual
    sizes = [
        kind.predict_nbytes([entries], capacity_tokens=n, n_sequences=1, dtype=as_dtype(dtype), config=options)
        for n in (few, many)
    ]
    return (sizes[1] - sizes[0]) / (many - few)


def dtype_nbytes(dtype: str | torch.dtype) -> int:
    return as_dtype(dtype).itemsize


def _subclasses(kind: type) -> Iterator[type]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _subclasses(sub)
