"""In the compiled step a request's log-probabilities are the same bits alone and in company, whatever the schedule."""

from __future__ import annotations

import random

import pytest
import torch

from labkit import Sampling, backends
from labkit.checkpoint.random_weights import byte_vocabulary
from labkit.kernels.cpu.compilation import compilation
from labkit.kvcache import Paged
from labkit.model import Model
from labkit.model.config import DenseFFN, GroupedAttention, ModelConfig, Rope, uniform
from labkit.quant import W8A8, Int4, Int8
from labkit.serving import ChunkedPrefill, Continuous, Service
from labkit.tokenizer import Tokenizer
from tests.kernels.compare import quantize
from tests.kernels.families import random_model

CONFIG = ModelConfig("llama", 300, 64, 256, uniform(2, GroupedAttention(4, 2, 16, rope=Rope()), DenseFFN(96)))


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    assert backends.prepare("fused"), compilation().reason


def fused_model(weights) -> Model:
    transformer = random_model(CONFIG)
    transformer = transformer.to(torch.bfloat16) if weights == "bf16" else quantize(transformer, weights)
    return Model(transformer, Tokenizer.from_gguf(byte_vocabulary(300)), name="tiny", backend="fused")


def asked(seed: int) -> list[dict]:
    chance = random.Random(seed)
    beginnings = ("", "A document that several readers ask about. ")
    return [
        {
            "prompt": chance.choice(beginnings) + "x" * chance.randint(1, 40),
            "max_new_tokens": chance.randint(2, 10),
            "sampling": Sampling(temperature=chance.choice((0.0, 1.0))),
            "seed": n,
            "ignore_eos": True,
            "n_logprobs": 0,
        }
        for n in range(5)
    ]


def served(model, scheduler, cache, requests, gap=0) -> list[tuple[list[int], list[float]]]:
    service = Service(model, scheduler=scheduler, kv_cache=cache, capacity_tokens=200, start=False)
    done = []
    for one in requests:
        done.append(service.submit(**one))
        for _ in range(gap):
            service.step()
    while service.step():
        pass
    for request in done:
        assert service.handle(request).result(timeout=0).trace.meta["computed_by"] == "fused"
    return [(r.sequence.token_ids, [own for own, _ in r.sequence.logprobs]) for r in done]


@pytest.mark.parametrize("weights", [None, "bf16", Int8(), W8A8(), Int4(group_size=32, head="int4")], ids=str)
def test_the_bits_do_not_depend_on_who_rides_along(weights):
    model = fused_model(weights)
    for seed, scheduler, cache, gap in (
        (1, Continuous(max_requests=5), Paged(block_size=16), 0),
        (2, ChunkedPrefill(max_requests=3, token_budget=16), Paged(block_size=8), 1),
        (3, Continuous(max_requests=4), Paged(block_size=8, n_blocks=14), 2),  # too few: some are computed again
    ):
        requests = asked(seed)
        alone = [served(model, Continuous(max_requests=1), Paged(prefix_sharing=False), [one])[0] for one in requests]
        assert served(model, scheduler, cache, requests, gap) == alone
