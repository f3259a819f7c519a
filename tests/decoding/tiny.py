"""Tiny models that speak bytes."""

from __future__ import annotations

import dataclasses

import torch

from labkit.checkpoint.random_weights import byte_vocabulary
from labkit.model import Model, ModelConfig, Transformer
from labkit.model.config import DenseFFN, GroupedAttention, Rope, uniform
from labkit.tokenizer import Tokenizer

N_VOCAB = 300


def fill(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + ("norm" in name))


def tiny(seed: int, *, n_layers: int = 3, context_tokens: int = 200, n_vocab: int = N_VOCAB) -> Model:
    attention = GroupedAttention(4, 2, 8, rope=Rope())
    config = ModelConfig("llama", n_vocab, 32, context_tokens, uniform(n_layers, attention, DenseFFN(64)))
    transformer = Transformer(config)
    fill(transformer, seed)
    return Model(transformer, Tokenizer.from_gguf(byte_vocabulary(n_vocab)), name=f"tiny-{seed}")


def with_context(model: Model, context_tokens: int) -> Model:
    """The same weights, with a shorter context."""
    transformer = Transformer(dataclasses.replace(model.config, context_tokens=context_tokens))
    transformer.load_state_dict(model.transformer.state_dict())
    return Model(transformer, model.tokenizer, name="short")
