"""What every backend's step answers: which rows, the hidden states behind them, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from labkit import backends
from labkit.backends.compiled import CompiledStep, pieces_of
from labkit.kvcache.contiguous import ContiguousCache
from labkit.kvcache.none import NoCache
from labkit.model import Model
from labkit.perf.timer import NULL_TIMER
from tests.kernels.caches import CACHES, build_cache
from tests.kernels.families import FAMILIES, random_model

OPTIONS = {"timer": NULL_TIMER, "should_stop": lambda: False}
SCRIPT = [{0: 9}, {0: 1}, {1: 4}, {0: 1, 1: 1}, {0: 3, 1: 2}, {0: 12}]


def compiled_step(transformer, cache):
    assert pieces_of(transformer, "aot_eager").ready(None)
    return CompiledStep(transformer, cache, "aot_eager", keep_hidden=True)


STEPS = {
    "reference": lambda t, c: backends.bind("reference", transformer=t, cache=c, keep_hidden=True)[1],
    "fused": lambda t, c: backends.bind("fused", transformer=t, cache=c, keep_hidden=True)[1],
    "compiled": compiled_step,
}


def oracle(transformer, history):
    """Hidden states and logits of whole sequences, by the model's own forward and without any cache."""
    out = {}
    for sequence_id, ids in history.items():
        cache = NoCache(transformer.cache_entries, capacity_tokens=len(ids))
        x = transformer.run_layers(torch.tensor(ids), cache)
        out[sequence_id] = x, transformer.predict(x)
    return out


@pytest.mark.parametrize("rows", ["last", "all"])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixture, shared"])
def test_rows_and_hidden_states(family, name, rows):
    if name == "compiled" and family.startswith("mixture"):
        pytest.skip("mixtures are not compiled")
    transformer = random_model(FAMILIES[family])
    cache = ContiguousCache(transformer.cache_entries, capacity_tokens=60, n_sequences=2)
    history = {0: [], 1: []}
    generator = torch.Generator().manual_seed(3)
    with torch.inference_mode():
        step = STEPS[name](transformer, cache)
        for counts in SCRIPT:
            ids = torch.randint(0, 101, (sum(counts.values()),), generator=generator)
            alone = list(counts) == [0]
            got = step(ids, counts=None if alone else counts, rows=rows, **OPTIONS)
            assert got.dtype == step.hidden.dtype == torch.float32
            for sequence_id, new in zip(counts, ids.split(list(counts.values())), strict=True):
                history[sequence_id] += new.tolist()
            known = oracle(transformer, {s: history[s] for s in counts})
            n_rows = {s: n if rows == "all" else 1 for s, n in counts.items()}
            hidden, wanted = (torch.cat([known[s][i][-n:] for s, n in n_rows.items()]) for i in (0, 1))
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(step.hidden, hidden, rtol=1e-3, atol=1e-3)
    torch._dynamo.reset()


@pytest.mark.parametrize("wrong", [-1, 101, 2**40])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("cache", ["none", "contiguous", "paged"])
def test_an_id_outside_the_vocabulary_is_refused_on_every_path(cache, name, wrong):
    transformer = random_model(FAMILIES["llama"])
    kept = build_cache(cache, transformer, n_sequences=2)
    with torch.inference_mode():
        step = STEPS[name](transformer, kept)
        for ids in ([wrong], [1, wrong, 2], [1] * 40 + [wrong]):
            with pytest.raises(IndexError, match=f"token {wrong} is not in the vocabulary of 101"):
                step(torch.tensor(ids), **OPTIONS)
        with pytest.raises(ValueError, match="not in the vocabulary"):
            step(torch.tensor([3, wrong]), counts={0: 1, 1: 1}, **OPTIONS)
        assert kept.n_tokens() == 0
        step(torch.tensor([1, 2]), **OPTIONS)
        if name == "fused" and cache != "none":
            with pytest.raises(IndexError, match="not in the vocabulary"):
                step.choose_next(wrong, more=True, **OPTIONS)
    with pytest.raises(ValueError, match="not in the vocabulary"):
        Model(transformer, None, name="small")([5, wrong])
    torch._dynamo.reset()


@pytest.mark.parametrize("cache", CACHES)
def test_the_reference_runs_no_compiled_code(cache, monkeypatch):
    """At no moment, on no cache: a kernel that somebody else had compiled is left alone."""
    from labkit.kernels.cpu import machine_code

    def compiled_code(*_, **__):
        raise AssertionError("the reference is plain PyTorch")

    monkeypatch.setattr(machine_code, "function", compiled_code)
    monkeypatch.setattr(machine_code, "address", compiled_code)
    transformer = random_model(FAMILIES["llama"])
    with torch.inference_mode():
        step = STEPS["reference"](transformer, build_cache(cache, transformer))
        for n in (20, 1, 3, 1):
            step(torch.arange(n), **OPTIONS)
        assert step.choose_next(1, more=True, **OPTIONS) is None
    assert (step.computed_by, step.reason) == ("reference", "")


def test_a_name_that_is_not_there_lists_those_that_are():
    transformer = random_model(FAMILIES["llama"])
    with pytest.raises(ValueError, match="unknown backend 'fast': choose one of reference, fused"):
        backends.bind("fast", transformer=transformer, cache=build_cache("none", transformer))
