"""What is served: a tiny model that speaks bytes, and a step that only keeps the cache's books."""

from __future__ import annotations

import zlib

import pytest
import torch

from labkit import backends
from labkit.checkpoint.random_weights import byte_vocabulary
from labkit.kvcache import blocks
from labkit.model import Model, ModelConfig, Transformer
from labkit.model.config import DenseFFN, GroupedAttention, Rope, uniform
from labkit.tokenizer import Tokenizer

N_VOCAB = 300


@pytest.fixture(autouse=True)
def _one_thread():
    """A model this small is not worth a second one, which would be waited for at each operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _reading(monkeypatch):
    """Blocks are read by PyTorch: nothing is to be compiled, and no kernel takes over in the middle."""
    monkeypatch.setattr(blocks, "make_reader", lambda cache: (None, "this test reads with PyTorch"))


@pytest.fixture(scope="session")
def model():
    """Two layers of random weights, with a context of 200 tokens."""
    config = ModelConfig("llama", N_VOCAB, 32, 200, uniform(2, GroupedAttention(4, 2, 8, rope=Rope()), DenseFFN(48)))
    transformer = Transformer(config)
    generator = torch.Generator().manual_seed(1)
    for name, weight in transformer.named_parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + ("norm" in name))
    return Model(transformer, Tokenizer.from_gguf(byte_vocabulary(N_VOCAB)), name="tiny")


class BookkeepingStep:
    """Opens and commits the cache's step, and likes a token that depends on nothing but the newest one."""

    computed_by, reason, hidden = "bookkeeping", "", None

    def __init__(self, cache) -> None:
        self.cache = cache

    def __call__(self, token_ids, *, counts=None, timer, should_stop, **_):
        self.cache.open(counts if counts is not None else len(token_ids))
        last = token_ids[self.cache.last_rows()].tolist()
        self.cache.commit()
        logits = torch.zeros(len(last), N_VOCAB)
        for row, token_id in enumerate(last):
            logits[row, 1 + zlib.crc32(bytes([token_id % 251])) % (N_VOCAB - 1)] = 1.0
        return logits

    def choose_next(self, token_id, **_):
        return None


@pytest.fixture
def bookkeeping(monkeypatch):
    """Nothing is computed: for many thousands of requests."""
    monkeypatch.setattr(backends, "bind", lambda choice, **of: (choice, BookkeepingStep(of["cache"])))
