"""The compiled step on every kind of cache, alone and for several sequences, equals the reference on the same kind."""

from __future__ import annotations

import pytest
import torch

from labkit import backends, registry
from labkit.backends import fused_step as fused
from labkit.backends import storage
from labkit.kvcache import base
from labkit.model.step import Cancelled
from labkit.perf.timer import NULL_TIMER, Timer
from labkit.quant import Int4, Int8
from tests.kernels.caches import CACHES, build_cache, kind_of
from tests.kernels.compare import dense_twin, quantize
from tests.kernels.families import FAMILIES, random_model


def test_every_kind_that_can_be_had_here_is_tried():
    offered = {info.name for info in registry.components("kv_cache") if info.unavailable is None}
    assert offered == {kind_of(name) for name in CACHES}


def fused_and_reference(name, transformer, oracle, script, *, dtype=torch.float32, n_sequences=1, n_threads=2):
    """Logits of both after each step of ``script``, a list of {sequence: tokens}."""
    results, ids = [], torch.Generator().manual_seed(5)
    tokens = [torch.randint(0, transformer.config.vocab_size, (sum(c.values()),), generator=ids) for c in script]
    with torch.inference_mode():
        for model, made in ((transformer, "fused"), (oracle, "reference")):
            cache = build_cache(name, model, dtype, n_sequences)
            step = fused.FusedStep(model, cache, n_threads) if made == "fused" else backends.ReferenceStep(model, cache)
            out = []
            for counts, these in zip(script, tokens, strict=True):
                only = list(counts) == [0]
                out.append(
                    step(these, counts=None if only else counts, timer=NULL_TIMER, should_stop=lambda: False).float()
                )
            results.append(torch.cat(out))
    return results


ALONE = [{0: 40}, *[{0: 1}] * 30, {0: 3}, {0: 1}, {0: 8}, *[{0: 1}] * 20]
TOGETHER = [{0: 20}, {1: 5}, {0: 1, 1: 1}, {2: 30}, *[{0: 1, 1: 1, 2: 1}] * 20, {1: 3, 2: 1}, *[{2: 1, 0: 1}] * 4]


RAGGED = [{0: 20, 1: 3}, {1: 12, 0: 1}, {2: 40, 0: 1, 1: 9}, {0: 1, 1: 1, 2: 1}, {2: 33, 0: 33, 1: 1}, {1: 1, 2: 9}]


@pytest.fixture
def served(monkeypatch):
    """Which storage served each call of the compiled function."""
    kinds, really = [], fused.FusedStep._storage
    monkeypatch.setattr(
        fused.FusedStep, "_storage", lambda step, kind, opened: kinds.append(kind) or really(step, kind, opened)
    )
    return kinds


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "long"])
@pytest.mark.parametrize("name", CACHES)
def test_one_sequence(name, family, served):
    transformer = random_model(FAMILIES[family])
    script = ALONE if name != "none" else [{0: n} for n in (1, 2, 40, 41, 42)]
    got, wanted = fused_and_reference(name, transformer, transformer, script)
    # a number that is rounded to 4 or 8 bits may fall on the other side for the last bit of a float32
    tolerance = 2e-2 if "int" in name else 2e-5
    assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()
    assert len(served) == len(script), "each of these steps is one call"
    in_place = kind_of(name) == "contiguous" or name == "paged"
    assert (storage.Staging in served) == (not in_place)


@pytest.mark.parametrize("name", [name for name in CACHES if name != "none"])
@pytest.mark.parametrize("weights", [None, Int8(), Int4(group_size=32)], ids=str)
@pytest.mark.parametrize("script", [TOGETHER, RAGGED], ids=["together", "ragged"])
def test_several_sequences(name, weights, script, served):
    transformer = quantize(random_model(FAMILIES["llama"]), weights)
    oracle = transformer if weights is None else dense_twin(transformer)
    got, wanted = fused_and_reference(name, transformer, oracle, script, n_sequences=3)
    tolerance = 2e-2 if "int" in name else (2e-3 if weights else 2e-5)
    assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()
    assert len(served) >= len(script)


@pytest.mark.parametrize("name", ["paged", "int8", "sliding"])
def test_bf16_stays_as_close_as_the_reference(name):
    exact = random_model(FAMILIES["llama"])
    narrow = random_model(FAMILIES["llama"], dtype=torch.bfloat16)
    got, reference = fused_and_reference(name, narrow, narrow, ALONE, dtype=torch.bfloat16)
    _, wanted = fused_and_reference(name, exact, exact, ALONE)
    assert (got - wanted).abs().max() <= 1.5 * (reference - wanted).abs().max()


@pytest.mark.parametrize("name", ["paged", "int4", "sliding", "contiguous"])
def test_any_number_of_threads_gives_the_same_bits(name):
    transformer = random_model(FAMILIES["llama"])
    outs = []
    with torch.inference_mode():
        step = fused.FusedStep(transformer, build_cache(name, transformer), 3)
        ids = torch.arange(60) % 101
        for n_threads in (3, 2, 1):
            step.cache.reset()
            run, step._active.run = step._active.run, lambda team, job, n=n_threads, **_: team.run(job, n)
            never = {"timer": NULL_TIMER, "should_stop": lambda: False}
            outs.append(torch.cat([step(ids[:50], **never), *(step(ids[i : i + 1], **never) for i in range(50, 60))]))
            step._active.run = run
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("name", [name for name in CACHES if name != "none"])
@pytest.mark.parametrize("family", ["llama", "sinks", "gemma2"])
def test_a_long_prompt_goes_on_from_a_stored_past(name, family, served, monkeypatch):
    """As the second part of a prompt does, or a second question. What a window has left behind is not made up."""
    empty = torch.empty
    monkeypatch.setattr(storage.torch, "empty", lambda *size, **options: empty(*size, **options).fill_(float("nan")))
    transformer = random_model(FAMILIES[family])
    script = [{0: 40}, *[{0: 1}] * 5, {0: 33}, {0: 1}, {0: 12}, {0: 1}]
    got, wanted = fused_and_reference(name, transformer, transformer, script)
    tolerance = 2e-2 if "int" in name else 2e-5
    assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()
    assert len(served) >= len(script)


@pytest.mark.parametrize("name", ["paged", "int8", "sliding"])
def test_a_long_prompt_on_a_stored_past_may_be_cut_or_stopped(name, monkeypatch):
    transformer = random_model(FAMILIES["llama"])
    ids, never, outs = torch.arange(80), {"timer": NULL_TIMER, "should_stop": lambda: False}, []
    with torch.inference_mode():
        for size in (80, 16):
            cache = build_cache(name, transformer)
            step = fused.FusedStep(transformer, cache, 2)
            monkeypatch.setattr(fused, "LAYER_S", 1e-9 if size == 16 else 1e9)
            step._first_chunk = size
            step(ids[:30], **never)
            with pytest.raises(Cancelled):
                step(ids[30:], timer=NULL_TIMER, should_stop=lambda: True)
            assert cache.n_tokens() == 30
            outs.append(step(ids[30:], **never))
    assert torch.equal(*outs)


@pytest.mark.parametrize("name", ["int8", "sliding"])
def test_a_stored_past_is_recalled_in_the_caches_time_and_can_be_stopped(name, monkeypatch):
    """A past of thousands of tokens takes long to unpack. One layer has been asked for, and it is as if none had."""
    transformer = random_model(FAMILIES["llama"])
    ids, never, asked = torch.arange(80), {"timer": NULL_TIMER, "should_stop": lambda: False}, []
    with torch.inference_mode():
        cache = build_cache(name, transformer)
        step = fused.FusedStep(transformer, cache, 2)
        step(ids[:30], **never)
        timer, dense = Timer(), cache.dense
        monkeypatch.setattr(
            cache, "dense", lambda idx, segment: asked.append((idx, timer._stack[-1])) or dense(idx, segment)
        )
        timer.begin()
        timer.begin_step("prefill")
        with pytest.raises(Cancelled):
            step(ids[30:], timer=timer, should_stop=lambda: bool(asked))
        assert asked == [(0, "kv_cache")]
        assert cache.n_tokens() == 30
        got = step(ids[30:], **never)
        cache.reset()
        step(ids[:30], **never)
        assert torch.equal(step(ids[30:], **never), got)


@pytest.mark.parametrize("name", CACHES)
def test_a_step_that_is_stopped_leaves_the_cache_as_it_was(name):
    transformer = random_model(FAMILIES["llama"])
    with torch.inference_mode():
        cache = build_cache(name, transformer)
        step = fused.FusedStep(transformer, cache, 2)
        ids, never = torch.arange(41), {"timer": NULL_TIMER, "should_stop": lambda: False}
        wanted = step(ids, **never)
        cache.reset()
        with pytest.raises(Cancelled):
            step(ids, timer=NULL_TIMER, should_stop=lambda: True)
        assert cache.n_tokens() == 0
        assert torch.equal(step(ids, **never), wanted)


@pytest.mark.parametrize("name", ["int8", "sliding"])
def test_a_prompt_can_be_stopped_while_it_is_stored(name, monkeypatch):
    """Rounding a long prompt takes time too. One layer has stored it, and it is as if none had."""
    transformer = random_model(FAMILIES["llama"])
    with torch.inference_mode():
        cache = build_cache(name, transformer)
        step = fused.FusedStep(transformer, cache, 2)
        ids, stored = torch.arange(60), []
        wanted = step(ids, timer=NULL_TIMER, should_stop=lambda: False)
        cache.reset()
        append = cache.append
        monkeypatch.setattr(cache, "append", lambda idx, **entries: stored.append(idx) or append(idx, **entries))
        with pytest.raises(Cancelled):
            step(ids, timer=NULL_TIMER, should_stop=lambda: bool(stored))
        assert stored == [0]
        assert cache.n_tokens() == 0
        assert torch.equal(step(ids, timer=NULL_TIMER, should_stop=lambda: False), wanted)


@pytest.mark.parametrize("name", ["paged", "int8", "none"])
def test_phases_cover_the_step(name):
    transformer = random_model(FAMILIES["llama"])
    timer = Timer()
    with torch.inference_mode():
        cache = build_cache(name, transformer)
        step = fused.FusedStep(transformer, cache, 2)
        timer.begin()
        for n in (30, 1, 1):
            timer.begin_step("decode")
            step(torch.arange(n), timer=timer, should_stop=lambda: False)
        timer.end_step()
    for record in timer.steps:
        assert {"attention", "ffn", "norm", "lm_head", "embed", "schedule", "kv_cache"} <= set(record.phases)
        assert sum(record.phases.values()) <= record.end_s - record.start_s + 1e-6


def test_a_kind_that_is_not_read_in_place_says_so():
    transformer = random_model(FAMILIES["llama"])

    class Own(type(build_cache("contiguous", transformer))):
        kind, in_place_tokens = "own", 0

    cache = Own(transformer.cache_entries, capacity_tokens=8)
    assert "the own cache has no compiled step" in storage.why_not(cache)
    with pytest.raises(NotImplementedError, match="keeps no rows beside each other"):
        base.KVCache.rows_at(cache, 0)


def test_blocks_of_a_width_that_the_kernel_does_not_read_go_to_the_reference():
    transformer = random_model(FAMILIES["long"])
    cache = build_cache("paged", transformer)
    step = backends.bind("fused", transformer=transformer, cache=cache)[1]
    assert step.computed_by == "reference"
    assert "heads of a multiple of 16 dims" in step.reason
