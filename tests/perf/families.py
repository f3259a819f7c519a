"""One small config for each thing that a family may do differently."""

from __future__ import annotations

import torch

from labkit.model.config import DenseFFN, GroupedAttention, Layer, ModelConfig, MoEFFN, Norm, Rope, uniform
from labkit.model.transformer import Transformer

ROPE = Rope(10_000.0)


def _config(family: str, layers: tuple[Layer, ...], **variant: object) -> ModelConfig:
    return ModelConfig(family, 96, 32, 64, layers, **variant)  # type: ignore[arg-type]


FAMILIES: dict[str, ModelConfig] = {
    "gpt2": _config(
        "gpt2",
        uniform(
            2,
            GroupedAttention(4, 4, 8, qkv_bias=True, out_bias=True),
            DenseFFN(64, "gelu_tanh", gated=False, bias=True),
        ),
        norm=Norm("layer", bias=True),
        learned_positions=True,
    ),
    "llama": _config("llama", uniform(3, GroupedAttention(4, 2, 8, rope=ROPE), DenseFFN(48))),
    "mqa": _config("llama", uniform(2, GroupedAttention(4, 1, 8, rope=ROPE), DenseFFN(48)), tied_embeddings=False),
    "qwen2": _config("qwen2", uniform(2, GroupedAttention(4, 2, 8, rope=ROPE, qkv_bias=True), DenseFFN(48))),
    "qwen3": _config("qwen3", uniform(2, GroupedAttention(4, 2, 16, rope=ROPE, qk_norm="head"), DenseFFN(48))),
    "olmo2": _config("olmo2", uniform(2, GroupedAttention(4, 4, 8, rope=ROPE, qk_norm="full"), DenseFFN(48), "post")),
    "mistral": _config("mistral", uniform(2, GroupedAttention(4, 2, 8, rope=ROPE, window=8), DenseFFN(48))),
    "sinks": _config("mistral", uniform(2, GroupedAttention(4, 2, 8, rope=ROPE, window=8, n_sinks=2), DenseFFN(48))),
    "gemma2": _config(
        "gemma2",
        tuple(
            Layer(GroupedAttention(4, 2, 8, rope=ROPE, window=w, softcap=50.0), DenseFFN(48, "gelu_tanh"), "sandwich")
            for w in (8, None)
        ),
        norm=Norm(unit_offset=True),
        embedding_scale=32**0.5,
        logit_softcap=30.0,
    ),
    "mixtral": _config("mixtral", uniform(2, GroupedAttention(4, 2, 8, rope=ROPE), MoEFFN(8, 2, 24))),
    "qwen2_moe": _config(
        "qwen2_moe",
        uniform(2, GroupedAttention(4, 4, 8, rope=ROPE), MoEFFN(6, 3, 24, d_ff_shared=40, shared_gate=True)),
        tied_embeddings=False,
        head_bias=True,
    ),
}


def random_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    """The config with small random weights."""
    torch.manual_seed(0)
    model = Transformer(config)
    for name, parameter in model.named_parameters():
        parameter.data = torch.ones_like(parameter) if "norm" in name else torch.randn_like(parameter) * 0.05
    return model.to(dtype)
