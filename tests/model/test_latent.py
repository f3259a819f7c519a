"""Latent attention's two forms are one, its gates are DeepSeek's, and whatever cannot serve it says so."""

from __future__ import annotations

import pytest
import torch

import labkit
from labkit import backends, registry
from labkit.kvcache.contiguous import ContiguousCache
from labkit.model.attention import build_attention, entries_of, kinds, latent
from labkit.model.config import Gate, GroupedAttention, Indexer, LatentAttention, Norm, Rope
from labkit.model.moe import gated
from labkit.model.step import Step
from tests.model.families import close, randomize

CONFIG = LatentAttention(4, 12, 8, 16, 24, d_query=20, rope=Rope(1e4, "interleaved"))
PLAIN = GroupedAttention(n_heads=8, n_kv_heads=8, d_head=16, rope=Rope())


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def module_of(config: LatentAttention):
    module = build_attention(32, config, Norm())
    randomize(module, seed=3)
    return module


def run(module, x, sizes, monkeypatch, *, expands):
    monkeypatch.setattr(latent.Attention, "expands", lambda self, step: expands)
    cache, outs = ContiguousCache([entries_of(module.config)], capacity_tokens=len(x)), []
    for piece in x.split(sizes):
        cache.open(len(piece))
        outs.append(module(piece, Step(cache), 0))
        cache.commit()
    return torch.cat(outs)


@pytest.mark.parametrize("sizes", [[40], [17, 1, 22], [1] * 40])
def test_expanded_and_absorbed_are_equal(sizes, monkeypatch):
    module, x = module_of(CONFIG), torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    absorbed = run(module, x, sizes, monkeypatch, expands=False)
    close(absorbed, run(module, x, sizes, monkeypatch, expands=True))
    close(absorbed, run(module, x, [40], monkeypatch, expands=True))


@pytest.mark.parametrize(("n_past", "n_new", "expands"), [(0, 1, False), (4000, 1, False), (0, 2048, True)])
def test_the_cheaper_form_is_taken(n_past, n_new, expands):
    """DeepSeek-V3's widths: a decode step absorbs, a long prompt expands."""
    config = LatentAttention(128, 128, 64, 128, 512, rope=Rope())
    with torch.device("meta"):
        module = latent.Attention(64, config, Norm())
    cache = ContiguousCache([entries_of(config)], capacity_tokens=8192, device="meta")
    cache._lengths[0] = n_past
    cache.open({0: n_new})
    assert module.expands(Step(cache)) is expands


def test_choosing_as_many_as_there_are_is_no_choice(monkeypatch):
    config = LatentAttention(4, 12, 8, 16, 24, rope=Rope(1e4, "interleaved"), indexer=Indexer(8, 16, 64))
    chosen, x = module_of(config), torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    plain = module_of(LatentAttention(4, 12, 8, 16, 24, rope=config.rope))
    plain.load_state_dict({k: v for k, v in chosen.state_dict().items() if not k.startswith("indexer")})
    close(run(chosen, x, [25, 15], monkeypatch, expands=False), run(plain, x, [25, 15], monkeypatch, expands=False))


def test_groups_keep_experts_out():
    """By hand: groups {0,1}, {2,3}, {4,5}; the best single expert lies in the group with the weakest two."""
    logits = torch.tensor([[0.0, 0.1, 2.0, 1.9, 3.0, -9.0]])
    gate = Gate("sigmoid", choice_bias=True, n_groups=3, n_groups_active=1, n_best=2, scaling=2.0)
    ids, gates = gated(logits, gate, n_active=2, renormalize=True, bias=torch.zeros(6))
    assert (sorted(ids[0].tolist()), float(gates.sum())) == ([2, 3], pytest.approx(2.0))
    pushed, _ = gated(logits, gate, n_active=2, renormalize=True, bias=torch.tensor([1.0, 1.0, 0, 0, 0, 0]))
    assert sorted(pushed[0].tolist()) == [0, 1]


@pytest.mark.parametrize("name", ["fused", "compiled"])
def test_a_backend_leaves_it_to_the_reference_and_says_why(name):
    model = labkit.load("random:tiny-deepseek-v3")
    cache = ContiguousCache(model.transformer.cache_entries, capacity_tokens=32)
    reason = backends.why_not(name, transformer=model.transformer, cache=cache)
    assert "grouped attention" in str(reason) or "mixtures" in str(reason)
    done = labkit.Pipeline(model, backend=name).generate("The capital", max_new_tokens=6, ignore_eos=True)
    assert (done.trace.meta["computed_by"], done.trace.meta["backend_note"]) == ("reference", reason)
    assert done.token_ids == labkit.Pipeline(model).generate("The capital", max_new_tokens=6, ignore_eos=True).token_ids


@pytest.mark.parametrize("name", ["tiny-deepseek-v3", "tiny-deepseek-v3.2"])
def test_the_pipeline_runs_it_with_and_without_a_cache(name):
    model = labkit.load(f"random:{name}")
    with_cache, without = (
        labkit.Pipeline(model, kv_cache=kind).generate("Once upon a time " * 3, max_new_tokens=8, ignore_eos=True)
        for kind in ("contiguous", "none")
    )
    assert with_cache.token_ids == without.token_ids
    with pytest.raises(ValueError, match="Choose a cache made for this attention"):
        labkit.Pipeline(model, kv_cache="int8").generate("Once", max_new_tokens=2)


@pytest.mark.parametrize("name", ["mla", "dsa", "csa", "hca"])
def test_a_kind_makes_a_config_that_is_of_that_kind(name):
    component, options = registry.find("attention", name)
    config = component.build(options, like=PLAIN)
    assert kinds.kind_of(config) == name
    with torch.device("meta"):
        state = build_attention(128, config, Norm()).state_dict()
    assert {(key, tuple(t.shape)) for key, t in state.items()} == {(n, shape) for n, shape, _ in config.tensors(128)}
