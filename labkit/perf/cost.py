"""What a step costs before it is run: FLOPs and bytes, by phase and by layer, in closed form.

    FLOPs   2 a weight and token in the products, and attention's scores (``attention_cost`` has every kind's)
    bytes   each weight once a step (the input embedding: only the rows looked up), the cache once, its new entries

Prefill, decode, a batch and a chunk are the same function with other counts: ``step_cost(config, n_new=..,
n_past=.., n_sequences=..)``. Counted are the products, as everyone counts them (norms, rotary, softmax and
activations are below 1 % of the FLOPs; what they cost in time is in the forecast's overhead).

Sources: Kaplan et al. (arXiv 2001.08361, table 1), PaLM's MFU (arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from labkit.model.config import Layer, ModelConfig, MoEFFN
from labkit.perf import formats
from labkit.perf.attention_cost import attention_work
from labkit.perf.weights import Weight, layer_weights, weights_of


@dataclass(frozen=True)
class Cost:
    """FLOPs, and bytes by what they are for. ``+`` adds."""

    flops: float = 0.0
    attention_flops: float = 0.0
    """The part of ``flops`` that grows with the context: scores and their use."""
    weight_bytes: float = 0.0
    kv_read_bytes: float = 0.0
    kv_write_bytes: float = 0.0
    n_weights: float = 0.0
    """Weight values that take part in products: the same for every format."""

    @property
    def bytes(self) -> float:
        """Bytes that must cross the memory bus at least once."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes

    @property
    def intensity(self) -> float:
        """FLOPs a byte: left of the ridge memory binds, right of it arithmetic."""
        return self.flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class StepCost:
    """One step of the model. ``phases`` by the timer's names; ``layers`` in order, without embedding and head."""

    phases: dict[str, Cost]
    layers: tuple[Cost, ...]
    n_new: int
    n_past: int
    n_sequences: int

    @property
    def total(self) -> Cost:
        return sum(self.phases.values(), Cost())

    @property
    def n_rows(self) -> int:
        """Tokens that go through the linears together."""
        return self.n_new * self.n_sequences


def step_cost(
    config: ModelConfig,
    *,
    n_new: int = 1,
    n_past: int = 0,
    n_sequences: int = 1,
    dtype: str = "fp32",
    weights: Any = None,
    kv_cache: Any = "contiguous",
    all_logits: bool = False,
    full_square: bool = False,
) -> StepCost:
    """The cost of ``n_new`` tokens for each of ``n_sequences`` sequences that hold ``n_past`` tokens already.

    A prefill of P tokens is ``n_new=P``; a decode step at context C is ``n_new=1, n_past=C``. ``all_logits``: the
    head for every token, not the last alone. ``full_square`` counts the masked half of a causal prefill too, which
    is what the plain formulation computes (and what a FLOP counter sees). Raises ValueError for counts below 1.

    >>> from labkit.model.config import *
    >>> small = ModelConfig("llama", 49152, 576, 8192, uniform(30, GroupedAttention(9, 3, 64), DenseFFN(1536)))
    >>> decode = step_cost(small, n_past=255, dtype="bf16").total
    >>> round(decode.weight_bytes / 1e6), round(decode.kv_read_bytes / 1e6, 1), round(decode.intensity, 1)
    (269, 5.9, 1.0)
    """
    if n_new < 1 or n_past < 0 or n_sequences < 1:
        raise ValueError(
            f"n_new={n_new}, n_past={n_past}, n_sequences={n_sequences}: n_new and n_sequences must be at least 1, "
            "n_past at least 0."
        )
    made = {
        layer: _layer_phases(config, layer, n_new, n_past, n_sequences, dtype, weights, kv_cache, full_square)
        for layer in set(config.layers)
    }
    phases: dict[str, Cost] = {"embed": _embed(config, n_new * n_sequences, dtype, weights)}
    for layer in config.layers:
        for name, cost in made[layer].items():
            phases[name] = phases.get(name, Cost()) + cost
    final = [w for w in weights_of(config) if w.name.startswith("final_norm")]
    phases["norm"] = phases["norm"] + Cost(weight_bytes=_nbytes(final, dtype, weights))
    phases["lm_head"] = _head(config, n_sequences * (n_new if all_logits else 1), dtype, weights)
    layers = tuple(sum(made[layer].values(), Cost()) for layer in config.layers)
    return StepCost(phases, layers, n_new, n_past, n_sequences)


def prefill_cost(config: ModelConfig, n_prompt_tokens: int, **setting: Any) -> StepCost:
    """All prompt tokens in one step, an empty cache before it."""
    return step_cost(config, n_new=n_prompt_tokens, **setting)


def decode_cost(config: ModelConfig, n_context_tokens: int, **setting: Any) -> StepCost:
    """One token a sequence after ``n_context_tokens``. Without a cache, the whole sequence again."""
    kind, _ = formats.cache_class(setting.get("kv_cache", "contiguous"))
    if kind.keeps_history:
        return step_cost(config, n_new=1, n_past=n_context_tokens, **setting)
    return step_cost(config, n_new=n_context_tokens + 1, **setting)


def _layer_phases(
    config: ModelConfig,
    layer: Layer,
    n_new: int,
    n_past: int,
    n_sequences: int,
    dtype: str,
    weights: Any,
    kv_cache: Any,
    full_square: bool,
) -> dict[str, Cost]:
    rows = n_new * n_sequences
    mine = list(layer_weights(config, layer))
    of = {name: [w for w in mine if w.phase == name] for name in ("attention", "ffn", "norm")}

    work = attention_work(
        layer.attention, n_new=n_new, n_past=n_past, dtype=dtype, kv_cache=kv_cache, full_square=full_square
    )
    scores = n_sequences * (work.core_flops + work.index_flops)
    linear = [w for w in of["attention"] if w.kind in ("linear", "stacked")]
    n_weights = sum(w.n_values for w in linear)
    return {
        "attention": Cost(
            flops=2.0 * rows * n_weights + scores,
            attention_flops=scores,
            weight_bytes=_nbytes(of["attention"], dtype, weights),
            kv_read_bytes=n_sequences * work.read_bytes,
            n_weights=n_weights,
        ),
        "kv_cache": Cost(kv_write_bytes=n_sequences * work.write_bytes),
        "ffn": _ffn(layer, of["ffn"], rows, dtype, weights),
        "norm": Cost(weight_bytes=_nbytes(of["norm"], dtype, weights)),
    }


def _ffn(layer: Layer, mine: list[Weight], rows: int, dtype: str, weights: Any) -> Cost:
    """Experts: each token visits k of E, so a step of R tokens reads E (1 - (1 - k/E)^R) of them on average."""
    visited, read = 1.0, 1.0
    if isinstance(layer.ffn, MoEFFN):
        visited = layer.ffn.n_active / layer.ffn.n_experts
        read = 1.0 - (1.0 - visited) ** rows
    flops = n_weights = nbytes = 0.0
    for weight in mine:
        size = formats.weight_nbytes(weight, dtype=dtype, weights=weights)
        if weight.kind == "expert":
            flops += 2.0 * rows * visited * weight.n_values
            n_weights += read * weight.n_values
            nbytes += read * size
        else:
            nbytes += size
            if weight.kind == "linear":
                flops += 2.0 * rows * weight.n_values
                n_weights += weight.n_values
    return Cost(flops=flops, weight_bytes=nbytes, n_weights=n_weights)


def _embed(config: ModelConfig, rows: int, dtype: str, weights: Any) -> Cost:
    """Rows that are looked up: the rest of the table stays where it is."""
    tables = [w for w in weights_of(config) if w.kind == "embedding"]
    tied = config.tied_embeddings
    return Cost(weight_bytes=sum(rows * formats.row_nbytes(w, dtype=dtype, weights=weights, tied=tied) for w in tables))


def _head(config: ModelConfig, rows: int, dtype: str, weights: Any) -> Cost:
    """A tied head streams the whole embedding table."""
    tied = config.tied_embeddings
    mine = [w for w in weights_of(config) if w.name.startswith("embedding.weight" if tied else "head.")]
    n_weights = config.vocab_size * config.d_model
    streamed = sum(formats.weight_nbytes(w, dtype=dtype, weights=weights, tied=tied) for w in mine)
    return Cost(flops=2.0 * rows * n_weights, weight_bytes=streamed, n_weights=n_weights)


def _nbytes(found: list[Weight], dtype: str, weights: Any) -> int:
    return sum(formats.weight_nbytes(w, dtype=dtype, weights=weights) for w in found)
