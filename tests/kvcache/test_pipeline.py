"""Every kind under the pipeline: lossless ones give the oracle's tokens, and a run may switch between two tokens."""

from __future__ import annotations

import threading

import pytest
import torch

from labkit import registry
from labkit.checkpoint.random_weights import byte_vocabulary
from labkit.engine import Engine
from labkit.kvcache import Sliding
from labkit.model import Model, ModelConfig, Transformer
from labkit.model.config import DenseFFN, GroupedAttention, Layer, Rope
from labkit.pipeline import Pipeline
from labkit.tokenizer import Tokenizer
from tests.kvcache.drive import LOSSLESS, LOSSY

PROMPT = "A cache remembers what was computed, so that it need not be computed again." * 2
CHOICES = {name: choice for name, choice in LOSSLESS.items() if name != "offloaded"}


@pytest.fixture(scope="module")
def model() -> Model:
    """Global, sliding and grouped layers, 16-wide heads: all that a kind may meet."""
    attention = [
        GroupedAttention(4, 2, 16, rope=Rope()),
        GroupedAttention(4, 4, 16, rope=Rope(), window=20),
        GroupedAttention(4, 1, 16, rope=Rope(), softcap=20.0),
    ]
    config = ModelConfig("llama", 300, 64, 400, tuple(Layer(a, DenseFFN(96)) for a in attention))
    transformer = Transformer(config)
    generator = torch.Generator().manual_seed(1)
    for name, weight in transformer.named_parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + ("norm" in name))
    return Model(transformer, Tokenizer.from_gguf(byte_vocabulary(300)), name="tiny")


@pytest.fixture(scope="module")
def oracle(model) -> list[int]:
    """The definition: the whole text through the model, once for each token, with no cache."""
    ids = model.tokenizer.encode(PROMPT)
    n_prompt = len(ids)
    for _ in range(60):
        ids.append(int(model(ids)[-1].argmax()))
    return ids[n_prompt:]


def generate(model, kv_cache, **options):
    pipeline = Pipeline(model, kv_cache=kv_cache, backend="reference")
    return pipeline.generate(PROMPT, max_new_tokens=60, ignore_eos=True, **options)


@pytest.mark.parametrize("name", ["none", *CHOICES])
def test_lossless_kinds_give_the_same_tokens(model, oracle, name):
    completion = generate(model, CHOICES.get(name, name))
    assert completion.token_ids == oracle
    assert completion.trace.meta["kv_cache_bytes"] == completion.trace.meta["kv_caches"][0]["nbytes"]


@pytest.mark.parametrize("info", registry.components("kv_cache"), ids=lambda info: info.name)
def test_every_registered_kind_generates(model, info):
    if info.unavailable:
        pytest.skip(f"{info.name} is not offered here: {info.unavailable}")
    assert len(generate(model, info.name).token_ids) == 60


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_kinds_stay_close(model, name):
    """Logits after a prompt that is read from the store, against those without a cache."""
    ids = model.tokenizer.encode(PROMPT)
    component, config = registry.find("kv_cache", LOSSY[name])
    cache = component.build(config, layers=model.transformer.cache_entries, capacity_tokens=400)
    rows = torch.cat([model(ids[:148], cache), *[model([token_id], cache) for token_id in ids[148:]]])
    expected = model(ids)
    error = (rows - expected)[148:].square().mean().sqrt() / expected.std()
    assert error < (0.03 if "int8" in name else 0.4)


@pytest.mark.parametrize("after", ["contiguous", "paged", "none"])
@pytest.mark.parametrize("before", ["none", "contiguous", "int8", Sliding(32)], ids=str)
def test_switching_mid_run(model, oracle, before, after):
    """The new cache is filled from the tokens, so what the old one lost is not inherited."""
    run = Pipeline(model, kv_cache=before, backend="reference").run(PROMPT, max_new_tokens=60, ignore_eos=True)
    run.use_cache(after)
    completion = run.result(60)
    used = completion.trace.meta["kv_caches"]
    assert used[-1]["name"] == after
    assert 0 <= used[-1]["from_token"] <= 60
    if before in ("none", "contiguous"):
        assert completion.token_ids == oracle
    assert completion.trace.meta["kv_cache"] == after


def test_switching_back_and_forth_between_given_tokens(model, oracle, monkeypatch):
    take = Engine._take

    def take_and_switch(engine, feed, output):
        take(engine, feed, output)
        if feed.sequence.n_new in (10, 30):
            engine.use_cache("contiguous" if feed.sequence.n_new == 10 else "none")

    monkeypatch.setattr(Engine, "_take", take_and_switch)
    pipeline = Pipeline(model, kv_cache="none", backend="reference")
    completion = pipeline.generate(PROMPT, max_new_tokens=60, ignore_eos=True)
    assert completion.token_ids == oracle
    assert [(used["from_token"], used["name"]) for used in completion.trace.meta["kv_caches"]] == [
        (0, "none"),
        (10, "contiguous"),
        (30, "none"),
    ]
    n_prompt = completion.trace.n_prompt_tokens
    widths = [step.n_tokens for step in completion.trace.steps]
    assert widths[9:13] == [n_prompt + 9, n_prompt + 10, 1, 1]
    assert widths[29:32] == [1, n_prompt + 30, n_prompt + 31]


def test_an_unknown_cache_is_refused_and_the_run_goes_on(model, oracle):
    run = Pipeline(model, backend="reference").run(PROMPT, max_new_tokens=60, ignore_eos=True)
    with pytest.raises(ValueError, match="unknown kv_cache 'pagd': choose one of none, contiguous, paged"):
        run.use_cache("pagd")
    assert run.result(60).token_ids == oracle


def test_usage_can_be_read_while_it_runs(model):
    run = Pipeline(model, kv_cache="paged", backend="reference").run(PROMPT, max_new_tokens=60, ignore_eos=True)
    readings, stop = [], threading.Event()

    def watch() -> None:
        while not stop.wait(1e-3):  # without a pause it would keep the interpreter to itself
            readings.append(run.cache_usage())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run.result(60)
    finally:
        stop.set()
        watcher.join()
    held = [usage.held_bytes for usage in readings if usage is not None]
    assert held == sorted(held)
    assert run.cache_usage().n_tokens == 150 + 59
