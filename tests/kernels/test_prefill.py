"""Prompts through the compiled step: W8A8, tiles of keys, whose products, how they are cut, what is not a number."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from labkit import backends
from labkit.backends import fused_step as fused
from labkit.backends import lookup
from labkit.kernels.cpu import cancellation, linear
from labkit.model.config import DenseFFN, GroupedAttention, ModelConfig, Rope, uniform
from labkit.model.step import Cancelled
from labkit.perf.timer import NULL_TIMER
from labkit.quant import W8A8, Int4, Int8
from tests.kernels.compare import cache_for, compare, dense_twin, quantize, run
from tests.kernels.families import FAMILIES, long_config, random_model


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 7, 100])
def test_w8a8_multiplies_the_rounded_integers_exactly(n_tokens):
    """The oracle rounds blocks of 64 and multiplies in int64: what is left is the last rounding to float32."""
    transformer = quantize(random_model(FAMILIES["gpt2"]), W8A8())
    for module in (transformer.layers[0].ffn.down_proj, transformer.layers[0].attention.q_proj):
        x = torch.randn(n_tokens, module.in_features) * torch.logspace(-2, 2, n_tokens)[:, None]
        weight = module.weight[:, : module.in_features].long()
        wanted = torch.zeros(n_tokens, module.out_features, dtype=torch.float64)
        for part in torch.arange(module.in_features).split(64):
            some = x[:, part].double()
            step = some.abs().amax(dim=1, keepdim=True) / 63
            q = torch.round(some / step).long()
            wanted += (q @ weight[:, part].to(q.dtype).T).double() * step
        wanted *= module.scales.double()
        wanted = wanted.float() if module.bias is None else (wanted + module.bias.double()).float()
        with linear.compiled_products(2):
            got = module(x)
        for result in (got, module(x)):
            assert (result - wanted).abs().max(dim=1).values.le(1e-3 * wanted.abs().amax(dim=1)).all()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_w8a8_prefill_equals_its_reference(family):
    transformer = quantize(random_model(FAMILIES[family]), W8A8())
    got, wanted = compare(transformer, transformer, chunks=(24, 1, 1))
    exact, _ = compare(dense_twin(transformer), dense_twin(transformer), chunks=(24, 1, 1))
    error = (got - wanted).abs().max()
    assert error <= 0.2 * (exact - wanted).abs().max(), "further from its reference than rounding moved it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(3, 1), (5, 1), (6, 2), (4, 4)])
def test_a_long_prompt_crosses_tiles_of_keys(n_heads, n_kv_heads, dtype):
    """Groups of 3 heads, of 3 + 1 + 1, and of 1; chunks that end inside a tile of 128 keys; the cache filled up."""
    config = long_config(n_heads, n_kv_heads)
    transformer = random_model(config)
    chunks = (150, 1, 5, 100, 44)
    ids = torch.randint(0, config.vocab_size, (sum(chunks),), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        step = backends.bind("fused", transformer=transformer, cache=cache_for(transformer, dtype, capacity=300))[1]
        got = run(step, ids, chunks)
        oracle = backends.ReferenceStep(transformer, cache_for(transformer, torch.float32, capacity=300))
        wanted = run(oracle, ids, chunks)
    tolerance = 2e-4 if dtype == torch.float32 else 3e-2
    assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("weights", [None, Int8(), Int4(group_size=32), Int4(group_size=32, head="int4")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_looking_tokens_up_equals_torchs_embedding(weights, dtype):
    for family in ("llama", "gpt2", "gemma2"):
        transformer = quantize(random_model(FAMILIES[family]).to(dtype), weights)
        ids, cache = torch.tensor([5, 0, 100, 5]), cache_for(transformer, dtype)
        opened = transformer.open(cache, len(ids))
        wanted = transformer.embedding(ids)
        found = torch.from_numpy(lookup.Table(transformer).rows(ids.numpy(), opened))
        assert found.dtype == torch.float32
        if family == "gemma2":
            wanted = wanted * torch.tensor(8.0, dtype=dtype)
        if family == "gpt2":
            wanted = wanted + transformer.positions.weight[:4]
        assert torch.equal(found, wanted.float())


@pytest.mark.parametrize("weights", [None, Int8(), W8A8(), Int4(group_size=32)], ids=str)
@pytest.mark.parametrize("chunks", [(9,), (9, 1)])
@pytest.mark.parametrize("damaged", ["ffn_norm.weight", "attention.k_proj.bias", "attention.v_proj.bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_not_a_number_comes_out_as_such(weights, chunks, damaged, dtype):
    """Rounding activations, keys or values to integers must not make a damaged model look sound."""
    transformer = quantize(random_model(FAMILIES["qwen3"]), weights)
    transformer.layers[0].get_parameter(damaged).data[3] = float("nan")
    with torch.inference_mode():
        step = backends.bind("fused", transformer=transformer, cache=cache_for(transformer, dtype))[1]
        logits = run(step, torch.arange(sum(chunks)), chunks)
    assert not logits.isfinite().any()


@pytest.mark.parametrize("layer_s", [1e-9, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [None, W8A8(), Int4(group_size=32)], ids=str)
def test_how_a_prompt_is_cut_does_not_show(monkeypatch, weights, dtype, layer_s):
    """In small pieces on a slow machine, so that it can be stopped; in large ones on a fast one; the same logits."""
    transformer = quantize(random_model(long_config(4, 2, d_head=16)), weights)
    monkeypatch.setattr(fused, "MAX_CHUNK", 96)
    ids = torch.arange(96 + 3 * 16 + 1) % transformer.config.vocab_size
    results, asked = [], []
    with torch.inference_mode():
        for first_chunk in (96, 1000):
            monkeypatch.setattr(fused, "LAYER_S", layer_s)
            cache = cache_for(transformer, dtype, capacity=200)
            step = backends.bind("fused", transformer=transformer, cache=cache)[1]
            step._first_chunk = first_chunk
            monkeypatch.setattr(cancellation, "cancellable", lambda *watched: contextlib.nullcontext())
            results.append(step(ids, timer=NULL_TIMER, should_stop=lambda: bool(asked.append(len(results)))))
    assert torch.equal(*results)
    assert asked.count(0) == (5 if layer_s < 1 else 2)  # 96, 16, 16, 16, and one alone; or 96 and 49
    assert asked.count(1) == 1


@pytest.mark.parametrize("n_threads", [1, 3])
def test_a_prompt_is_left_between_two_layers(n_threads):
    """Asked to stop while the compiled function runs: it returns early, stores nothing, and the next run is right."""
    layers = uniform(200, GroupedAttention(4, 2, 16, rope=Rope()), DenseFFN(96))
    transformer = random_model(ModelConfig("llama", 101, 64, 512, layers))
    ids, never = torch.arange(250) % 101, {"timer": NULL_TIMER, "should_stop": lambda: False}
    with torch.inference_mode():
        cache = cache_for(transformer, capacity=300)
        step = fused.FusedStep(transformer, cache, n_threads)
        whole = time.perf_counter()
        wanted = step(ids, **never)
        whole = time.perf_counter() - whole
        cache.reset()
        looks = []
        with pytest.raises(Cancelled):
            step(ids, timer=NULL_TIMER, should_stop=lambda: bool(looks.append(1)) or len(looks) > 1)
        assert len(looks) >= 2, "seen by whoever looks during the run, not before it"
        assert cache.n_tokens() == 0
        assert torch.equal(step(ids, **never), wanted)
    assert whole > 2 * cancellation.EVERY_S, "too short to be stopped within: give it more layers"
