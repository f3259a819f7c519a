"""Configs of every kind of attention, and of the rotary positions that they share: data, from which shapes follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal


def _linear(name: str, d_out: int, d_in: int, bias: bool = False) -> Iterator[tuple[str, tuple[int, ...], str]]:
    yield f"{name}.weight", (d_out, d_in), "linear"
    if bias:
        yield f"{name}.bias", (d_out,), "bias"


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context the model was trained on."""

    kind: Literal["linear", "dynamic", "yarn", "llama3", "longrope"]
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al., arXiv 2104.09864). ``rotary_dims`` None rotates the whole head."""

    theta: float = 10_000.0
    layout: Literal["half", "interleaved"] = "half"
    rotary_dims: int | None = None
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class GroupedAttention:
    """MHA (n_kv_heads == n_heads), MQA (1) and GQA (between), with or without a sliding window."""

    kernels: ClassVar[str] = "grouped"
    """Which kernels compute this attention. A backend that has none of that name leaves the model to the reference."""

    n_heads: int
    n_kv_heads: int
    d_head: int
    rope: Rope | None = None
    window: int | None = None
    """Number of latest positions a token sees, itself included; None sees all."""
    n_sinks: int = 0
    """First positions that stay visible outside the window (StreamingLLM, arXiv 2309.17453)."""
    qk_norm: Literal[None, "head", "full"] = None
    qkv_bias: bool = False
    out_bias: bool = False
    softcap: float | None = None
    scale: float | None = None
    """Multiplies q.k; None is d_head ** -0.5."""


@dataclass(frozen=True)
class Indexer:
    """Chooses the ``top_k`` rows that each query sees (the lightning indexer of DeepSeek-V3.2)."""

    n_heads: int
    d_head: int
    top_k: int


@dataclass(frozen=True)
class LatentAttention:
    """MLA (DeepSeek-V2, arXiv 2405.04434): one latent a token in place of keys and values; with an ``indexer`` DSA."""

    kernels: ClassVar[str] = "latent"

    n_heads: int
    d_nope: int
    """Width of a head's query and key without position."""
    d_rope: int
    """Width with position, one for all heads of a key."""
    d_value: int
    d_latent: int
    d_query: int | None = None
    """Width that queries are squeezed through; None: they are not."""
    rope: Rope | None = None
    bias: bool = False
    scale: float | None = None
    indexer: Indexer | None = None

    @property
    def d_head(self) -> int:
        """Width of a query's head."""
        return self.d_nope + self.d_rope

    def tensors(self, d_model: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """(name, shape, kind) of the weights. ``stacked`` ones take part in products, and no format packs them."""
        if self.d_query is None:
            yield from _linear("q_proj", self.n_heads * self.d_head, d_model)
        else:
            yield from _linear("q_a_proj", self.d_query, d_model, self.bias)
            yield "q_a_norm.weight", (self.d_query,), "norm"
            yield from _linear("q_b_proj", self.n_heads * self.d_head, self.d_query)
        yield from _linear("kv_a_proj", self.d_latent + self.d_rope, d_model, self.bias)
        yield "kv_a_norm.weight", (self.d_latent,), "norm"
        yield "k_up", (self.n_heads, self.d_nope, self.d_latent), "stacked"
        yield "v_up", (self.n_heads, self.d_value, self.d_latent), "stacked"
        yield from _linear("o_proj", d_model, self.n_heads * self.d_value, self.bias)
        if self.indexer is not None:
            indexer = self.indexer
            yield from _linear("indexer.q_proj", indexer.n_heads * indexer.d_head, self.d_query or d_model)
            yield from _linear("indexer.k_proj", indexer.d_head, d_model)
            yield "indexer.k_norm.weight", (indexer.d_head,), "norm"
            yield "indexer.k_norm.bias", (indexer.d_head,), "norm"
            yield from _linear("indexer.weights_proj", indexer.n_heads, d_model)


@dataclass(frozen=True)
class CompressedAttention:
    """DeepSeek-V4's layers (arXiv 2606.19348): a window of single tokens, and with a ``rate`` one row a block of
    tokens. CSA: overlapping blocks and an ``indexer``; HCA: a high rate, neither; rate 0: the window alone."""

    kernels: ClassVar[str] = "compressed"

    n_heads: int
    d_head: int
    d_query: int
    window: int
    n_groups: int
    """Groups of heads that the output projection keeps apart, each ``d_group`` wide after it."""
    d_group: int
    rope: Rope
    rate: int = 0
    overlap: bool = False
    indexer: Indexer | None = None

    @property
    def d_rope(self) -> int:
        """The last dims of a head, those that are turned."""
        return self.rope.rotary_dims or self.d_head

    def tensors(self, d_model: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """As ``LatentAttention.tensors``."""
        d_all = self.n_heads * self.d_head
        yield from _linear("q_a_proj", self.d_query, d_model)
        yield "q_a_norm.weight", (self.d_query,), "norm"
        yield from _linear("q_b_proj", d_all, self.d_query)
        yield from _linear("kv_proj", self.d_head, d_model)
        yield "kv_norm.weight", (self.d_head,), "norm"
        yield "sinks", (self.n_heads,), "bias"
        if self.rate:
            yield from self._compressor("compressor", self.d_head, d_model)
        if self.indexer is not None:
            yield from _linear("indexer.q_proj", self.indexer.n_heads * self.indexer.d_head, self.d_query)
            yield from _linear("indexer.weights_proj", self.indexer.n_heads, d_model)
            yield from self._compressor("indexer.compressor", self.indexer.d_head, d_model)
        yield "o_a", (self.n_groups, self.d_group, d_all // self.n_groups), "stacked"
        yield from _linear("o_b_proj", d_model, self.n_groups * self.d_group)

    def _compressor(self, name: str, d_row: int, d_model: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
        width = d_row * (2 if self.overlap else 1)
        yield f"{name}.kv", (width, d_model), "stacked"
        yield f"{name}.gate", (width, d_model), "stacked"
        yield f"{name}.position_bias", (self.rate, width), "bias"
        yield f"{name}.norm.weight", (d_row,), "norm"
