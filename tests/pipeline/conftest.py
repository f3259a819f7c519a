"""What a run is tried on."""

from __future__ import annotations

import pytest
import torch

from labkit.checkpoint.random_weights import byte_vocabulary
from labkit.model import Model, ModelConfig, Transformer
from labkit.model.config import DenseFFN, GroupedAttention, Rope, uniform
from labkit.pipeline import Pipeline
from labkit.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def model():
    """Three layers of random weights that speak bytes, with a context of 200 tokens."""
    n_vocab = 300
    config = ModelConfig("llama", n_vocab, 32, 200, uniform(3, GroupedAttention(4, 2, 8, rope=Rope()), DenseFFN(48)))
    transformer = Transformer(config)
    generator = torch.Generator().manual_seed(1)
    for name, weight in transformer.named_parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + ("norm" in name))
    return Model(transformer, Tokenizer.from_gguf(byte_vocabulary(n_vocab)), name="tiny")


@pytest.fixture
def pipeline(model) -> Pipeline:
    return Pipeline(model, backend="reference")
