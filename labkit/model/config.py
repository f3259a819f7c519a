"""What a model is made of, as data: one vocabulary for every family.

A ``ModelConfig`` is a list of layers, and a layer names its attention and its FFN by a frozen config
dataclass. Variants are therefore data: a pattern of local and global layers is a tuple, not a flag that
``forward`` looks at. ``labkit.checkpoint.translate`` is the only place that knows other projects' names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from labkit.model.attention_config import (
    CompressedAttention,
    GroupedAttention,
    Indexer,
    LatentAttention,
    Rope,
    RopeScaling,
)

__all__ = [
    "DTYPES",
    "FFN",
    "Attention",
    "CompressedAttention",
    "DenseFFN",
    "Gate",
    "GroupedAttention",
    "Indexer",
    "LatentAttention",
    "Layer",
    "MoEFFN",
    "ModelConfig",
    "Norm",
    "Rope",
    "RopeScaling",
    "Streams",
    "as_dtype",
    "dtype_name",
    "uniform",
]


@dataclass(frozen=True)
class Norm:
    """RMSNorm, or LayerNorm with ``kind="layer"``. ``unit_offset``: Gemma stores weight - 1."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    unit_offset: bool = False
    bias: bool = False


@dataclass(frozen=True)
class DenseFFN:
    """``W_down(act(W_gate x) * W_up x)`` when gated, else ``W_down act(W_up x)``."""

    d_ff: int
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated: bool = True
    bias: bool = False
    limit: float | None = None
    """Gate and up are cut off there before they meet: the gate above, up on both sides (DeepSeek-V4)."""


@dataclass(frozen=True)
class Gate:
    """How a router's scores choose the experts and weigh them. The default is Mixtral's: softmax, the k largest."""

    scoring: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    choice_bias: bool = False
    """A learned bias is added for the choice only, not to the weights (DeepSeek-V3's load balancing)."""
    n_groups: int = 1
    n_groups_active: int = 1
    """Experts outside the best groups are not chosen (they lie on other machines)."""
    n_best: int = 1
    """How many of its best experts make a group's score."""
    scaling: float = 1.0


@dataclass(frozen=True)
class MoEFFN:
    """A router sends each token to ``n_active`` of ``n_experts`` FFNs; shared experts see every token."""

    n_experts: int
    n_active: int
    d_ff: int
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    renormalize: bool = True
    d_ff_shared: int = 0
    """Width of the shared expert, 0 when there is none."""
    shared_gate: bool = False
    gate: Gate = Gate()
    n_ids: int = 0
    """Token ids in the table that names each token's experts (V4's first layers); 0: the router chooses."""
    limit: float | None = None
    """As ``DenseFFN.limit``."""

    @property
    def kernels(self) -> str:
        """Which kernels compute it: compiled steps know Mixtral's gate only."""
        plain = self.gate == Gate() and not self.n_ids and self.limit is None
        return "softmax-top-k" if plain else "gated"


@dataclass(frozen=True)
class Streams:
    """Several residual streams, mixed at every sub-layer (``labkit.model.streams``)."""

    n_streams: int
    n_rounds: int = 20
    eps: float = 1e-6

    def tensors(self, d_model: int, *, last: bool = False) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """(name, shape, kind) of one sub-layer's weights; ``last``: of the one after all layers."""
        n_out = self.n_streams if last else (2 + self.n_streams) * self.n_streams
        yield "weight", (n_out, self.n_streams * d_model), "stacked"
        yield "base", (n_out,), "bias"
        yield "scale", (1 if last else 3,), "bias"


Attention: TypeAlias = "GroupedAttention | LatentAttention | CompressedAttention"
FFN: TypeAlias = "DenseFFN | MoEFFN"


@dataclass(frozen=True)
class Layer:
    """One block. ``norms``: where its norms stand.

    pre       x + f(norm(x))                  GPT-2, Llama, Qwen, Mistral, Phi-3
    post      x + norm(f(x))                  OLMo-2
    sandwich  x + norm(f(norm(x)))            Gemma 2 and 3
    streams   mixed streams + f(norm(a sum))  DeepSeek-V4; needs ``ModelConfig.streams``
    """

    attention: Attention
    ffn: FFN
    norms: Literal["pre", "post", "sandwich", "streams"] = "pre"


@dataclass(frozen=True)
class ModelConfig:
    """Everything needed to build a ``Transformer``; shapes follow from it alone."""

    family: str
    vocab_size: int
    d_model: int
    context_tokens: int
    """The longest sequence the positions support."""
    layers: tuple[Layer, ...]
    norm: Norm = field(default_factory=Norm)
    tied_embeddings: bool = True
    learned_positions: bool = False
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    head_bias: bool = False
    streams: Streams | None = None

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def n_heads(self) -> int:
        return self.layers[0].attention.n_heads

    @property
    def n_kv_heads(self) -> int:
        """Key and value heads of the first layer. Latent and compressed attention have one row for all heads: 1."""
        return getattr(self.layers[0].attention, "n_kv_heads", 1)

    @property
    def d_head(self) -> int:
        return self.layers[0].attention.d_head

    @property
    def d_ff(self) -> int:
        return self.layers[0].ffn.d_ff


def uniform(n_layers: int, attention: Attention, ffn: FFN, norms: str = "pre") -> tuple[Layer, ...]:
    """The common case: every layer alike."""
    return (Layer(attention, ffn, norms),) * n_layers  # type: ignore[arg-type]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def as_dtype(name: str | torch.dtype) -> torch.dtype:
    """The torch dtype that ``name`` means: fp32, bf16, fp16, or torch's own names.

    Raises ValueError that lists the choices.
    """
    if isinstance(name, torch.dtype):
        if name in DTYPES.values():
            return name
    else:
        long_names = {str(value).removeprefix("torch."): value for value in DTYPES.values()}
        if name in DTYPES or name in long_names:
            return DTYPES.get(name) or long_names[name]
    raise ValueError(f"unknown dtype {name!r}: choose one of auto, {', '.join(DTYPES)}.")


def dtype_name(dtype: torch.dtype) -> str:
    """The short name: fp32, bf16 or fp16."""
    return next((name for name, value in DTYPES.items() if value == dtype), str(dtype).removeprefix("torch."))
