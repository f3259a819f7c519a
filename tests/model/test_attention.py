"""The attention reference against a double loop over heads and tokens, and the named kinds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from labkit import registry
from labkit.kernels import ops
from labkit.kvcache.contiguous import ContiguousCache
from labkit.kvcache.none import NoCache
from labkit.model import ModelConfig, Transformer
from labkit.model.attention import kinds
from labkit.model.config import DenseFFN, GroupedAttention, Rope, uniform
from tests.model.families import close, randomize, token_ids


def by_hand(q, k, v, *, n_past, scale, window, n_sinks, softcap):
    """Attention as a sentence: for each head, each query, over each key it may see."""
    out = torch.zeros_like(q)
    per_group = q.shape[1] // k.shape[0]
    for t in range(q.shape[0]):
        at = n_past + t
        seen = [s for s in range(at + 1) if window is None or s > at - window or s < n_sinks]
        for h in range(q.shape[1]):
            scores = [scale * float(q[t, h] @ k[h // per_group, s]) for s in seen]
            if softcap is not None:
                scores = [softcap * math.tanh(x / softcap) for x in scores]
            total = sum(math.exp(x) for x in scores)
            out[t, h] = sum(math.exp(x) / total * v[h // per_group, s] for x, s in zip(scores, seen, strict=True))
    return out


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("window", "n_sinks"), [(None, 0), (4, 0), (4, 2), (1, 0), (50, 0)])
@pytest.mark.parametrize(("n_past", "n_new"), [(0, 1), (0, 9), (6, 1), (6, 5), (3, 1)])
@pytest.mark.parametrize(("n_heads", "n_groups"), [(4, 4), (4, 2), (4, 1)])
def test_attend_equals_a_loop(monkeypatch, n_heads, n_groups, n_past, n_new, window, n_sinks, softcap):
    generator = torch.Generator().manual_seed(7)
    n = n_past + n_new
    q = torch.randn(n_new, n_heads, 8, generator=generator)
    k, v = torch.randn(2, n_groups, n, 8, generator=generator)
    settings = {"n_past": n_past, "scale": 0.3, "window": window, "n_sinks": n_sinks, "softcap": softcap}
    got = ops.attend(q, k, v, **settings)
    torch.testing.assert_close(got, by_hand(q, k, v, **settings), rtol=1e-5, atol=1e-5)
    # in blocks of queries, as a long prompt is read
    monkeypatch.setattr(ops, "BLOCK_QUERIES", 2)
    torch.testing.assert_close(ops.attend(q, k, v, **settings), got, rtol=1e-5, atol=1e-5)
    # a cache may hold them in any order, if it says which position is where
    order = torch.randperm(n, generator=generator)
    mixed = ops.attend(q, k[:, order], v[:, order], k_positions=order, **settings)
    torch.testing.assert_close(mixed, got, rtol=1e-5, atol=1e-5)


def small(attention: GroupedAttention) -> ModelConfig:
    return ModelConfig("llama", 96, 32, 64, uniform(2, attention, DenseFFN(48)))


FOUR_HEADS = GroupedAttention(4, 2, 8, rope=Rope())


@pytest.mark.parametrize(
    "attention", [replace(FOUR_HEADS, window=6, n_sinks=n) for n in (0, 3)], ids=["window", "sinks"]
)
def test_a_window_decodes_as_it_prefills(attention):
    ours = Transformer(small(attention))
    randomize(ours, seed=1)
    ids = token_ids(20)
    with torch.inference_mode():
        whole = ours(ids, NoCache(ours.cache_entries, capacity_tokens=20))
        cache = ContiguousCache(ours.cache_entries, capacity_tokens=20)
        close(torch.cat([ours(i, cache) for i in ids.split(1)]), whole)


def test_sinks_stay_visible_and_the_gap_does_not():
    attention = replace(FOUR_HEADS, window=4, n_sinks=1)
    ours = Transformer(replace(small(attention), layers=uniform(1, attention, DenseFFN(48))))
    randomize(ours, seed=2)
    ids = token_ids(12)
    with torch.inference_mode():

        def last(changed: int | None) -> torch.Tensor:
            new = ids.clone()
            if changed is not None:
                new[changed] = (new[changed] + 1) % 96
            return ours(new, NoCache(ours.cache_entries, capacity_tokens=12))[-1]

        assert not torch.allclose(last(0), last(None))  # the sink
        assert torch.equal(last(5), last(None))  # between sink and window
        assert not torch.allclose(last(9), last(None))  # inside the window


@pytest.mark.parametrize(
    ("choice", "heads", "window"),
    [("mha", 4, None), ("mqa", 1, None), (kinds.GQA(2), 2, None), (kinds.Sliding(16, 4), 2, 16)],
)
def test_a_kind_makes_a_config_that_runs(choice, heads, window):
    config = kinds.with_attention(small(FOUR_HEADS), choice)
    attention = config.layers[0].attention
    assert (attention.n_kv_heads, attention.window) == (heads, window)
    assert kinds.kinds_of(config) == (registry.find("attention", choice)[0].name,)
    ours = Transformer(config)
    randomize(ours, seed=3)
    with torch.inference_mode():
        logits = ours(token_ids(5), NoCache(ours.cache_entries, capacity_tokens=5))
    assert logits.shape == (5, 96)
    assert ours.cache_entries[0].values_per_token == 2 * heads * 8


def test_the_registry_lists_the_kinds_and_each_says_what_it_is():
    names = [info.name for info in registry.components("attention")]
    assert names[:4] == ["mha", "mqa", "gqa", "sliding"]
    assert all(info.summary for info in registry.components("attention"))


def test_a_trained_model_says_why_it_has_no_other_kind():
    config = small(FOUR_HEADS)
    assert kinds.why_not(config, "gqa") is None
    assert "mqa needs other key and value weights" in kinds.why_not(config, "mqa")
    assert "window would change what it says" in kinds.why_not(config, "sliding")


def test_head_counts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"4 query heads cannot share 3 .* choose one of 1, 2, 4"):
        kinds.with_attention(small(FOUR_HEADS), kinds.GQA(3))
    with pytest.raises(ValueError, match="unknown attention 'gqq': choose one of mha, mqa, gqa, sliding"):
        kinds.with_attention(small(FOUR_HEADS), "gqq")
