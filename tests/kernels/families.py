"""Small models of every family's shape, with random weights: what a backend must equal the reference on."""

from __future__ import annotations

import torch

from labkit.model import ModelConfig, Transformer
from labkit.model.config import DenseFFN, GroupedAttention, Layer, MoEFFN, Norm, Rope, RopeScaling, uniform

ROPE = Rope(theta=10_000.0)
VOCAB = 101  # neither even nor a multiple of a panel


def _config(family: str, layers: tuple[Layer, ...], **options: object) -> ModelConfig:
    return ModelConfig(family, VOCAB, 64, 256, layers, **options)  # type: ignore[arg-type]


def _attention(**options: object) -> GroupedAttention:
    sizes = {"n_heads": 4, "n_kv_heads": 2, "d_head": 16, "rope": ROPE}
    return GroupedAttention(**{**sizes, **options})  # type: ignore[arg-type]


def long_config(n_heads: int, n_kv_heads: int, d_head: int = 24) -> ModelConfig:
    """A context of several tiles of keys."""
    attention = _attention(n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head)
    return ModelConfig("llama", VOCAB, 64, 512, uniform(2, attention, DenseFFN(96)))


FAMILIES: dict[str, ModelConfig] = {
    "llama": _config("llama", uniform(2, _attention(), DenseFFN(96))),
    "untied, multi-query": _config("llama", uniform(2, _attention(n_kv_heads=1), DenseFFN(96)), tied_embeddings=False),
    "gpt2": _config(
        "gpt2",
        uniform(
            2,
            _attention(n_kv_heads=4, rope=None, qkv_bias=True, out_bias=True),
            DenseFFN(128, "gelu_tanh", gated=False, bias=True),
        ),
        norm=Norm("layer", bias=True),
        learned_positions=True,
    ),
    "qwen3": _config("qwen3", uniform(2, _attention(qk_norm="head", qkv_bias=True), DenseFFN(96))),
    "olmo2": _config("olmo2", uniform(2, _attention(qk_norm="full"), DenseFFN(96), "post")),
    "gemma2": _config(
        "gemma2",
        (
            Layer(_attention(window=5, softcap=20.0, scale=0.3), DenseFFN(96, "gelu_tanh"), "sandwich"),
            Layer(_attention(softcap=20.0), DenseFFN(96, "gelu"), "sandwich"),
        ),
        norm=Norm(unit_offset=True),
        embedding_scale=8.0,
        logit_softcap=15.0,
    ),
    "sinks": _config("llama", uniform(2, _attention(window=6, n_sinks=2), DenseFFN(96, "relu"))),
    "partial, interleaved": _config(
        "phi",
        uniform(2, _attention(rope=Rope(layout="interleaved", rotary_dims=8)), DenseFFN(96)),
    ),
    "yarn": _config(
        "llama",
        uniform(2, _attention(rope=Rope(scaling=RopeScaling("yarn", factor=4.0, original_context=64))), DenseFFN(96)),
    ),
    "mixture": _config("mixtral", uniform(2, _attention(), MoEFFN(5, 2, 32))),
    "mixture, shared": _config(
        "qwen2_moe",
        (
            Layer(_attention(qkv_bias=True), MoEFFN(6, 3, 40, renormalize=False, d_ff_shared=64, shared_gate=True)),
            Layer(_attention(qkv_bias=True), DenseFFN(96)),
            Layer(_attention(), MoEFFN(3, 1, 64, d_ff_shared=32)),
        ),
    ),
    "long": _config("llama", uniform(2, _attention(d_head=24), DenseFFN(104)), head_bias=False),
}
NOT_COMPILED = {
    "odd width": _config("llama", uniform(1, _attention(d_head=12), DenseFFN(96))),
}


def random_model(config: ModelConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Transformer:
    """Weights large enough that each part of the model matters."""
    torch.manual_seed(seed)
    transformer = Transformer(config)
    for name, parameter in transformer.named_parameters():
        if "norm" in name and parameter.ndim == 1:
            parameter.normal_(0.0 if config.norm.unit_offset else 1.0, 0.1)
        else:
            parameter.normal_(0.0, 0.15)
    return transformer.to(dtype)
