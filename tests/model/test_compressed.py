"""V4's attention modules equal transformers' ``deepseek_v4``, however the tokens come."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import labkit
from labkit.kvcache.contiguous import ContiguousCache
from labkit.kvcache.none import NoCache
from labkit.model.attention import entries_of
from tests.model.families import close
from tests.model.v4 import HEAVY, KINDS, RATE, hidden, layer_config, new_cache, oracle, ours, run

pytest.importorskip("transformers", reason="transformers is the oracle")
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@every_kind
@pytest.mark.parametrize("top_k", [3, 50], ids=["chosen", "more than there are"])
@pytest.mark.parametrize("n", [1, RATE - 1, RATE, RATE + 1, HEAVY - 1, HEAVY, 37])
def test_prefill_equals_transformers(kind, n, top_k):
    """Shorter than a block, at a block's border, and well beyond; with a choice to make and without."""
    x = hidden(n)
    want = oracle(kind, x, top_k=top_k)
    close(run(ours(kind, top_k), x, new_cache(kind, top_k=top_k)), want)
    close(run(ours(kind, top_k), x, NoCache([entries_of(layer_config(kind, top_k))], capacity_tokens=n)), want)


@every_kind
def test_token_by_token_equals_transformers_cache(kind):
    x, cache = hidden(29), new_cache(kind)
    got = torch.cat([run(ours(kind), piece, cache) for piece in (x[:5], *x[5:].split(1))])
    close(got, oracle(kind, x, chunks=(5, *(1,) * 24)))
    close(got, oracle(kind, x))


@every_kind
@pytest.mark.parametrize("size", [3, 7, RATE, HEAVY])
def test_chunks_equal_the_whole(kind, size):
    x, cache = hidden(41), new_cache(kind)
    close(torch.cat([run(ours(kind), piece, cache) for piece in x.split(size)]), oracle(kind, x))


@every_kind
def test_a_ragged_batch_equals_each_alone(kind):
    xs, cache = [hidden(n, seed=n) for n in (19, 2, 9)], new_cache(kind, n_sequences=3)
    firsts = run(ours(kind), torch.cat([x[:-1] for x in xs]), cache, {i: len(x) - 1 for i, x in enumerate(xs)})
    lasts = run(ours(kind), torch.cat([x[-1:] for x in xs]), cache, dict.fromkeys(range(3), 1))
    for x, first, last in zip(xs, firsts.split([len(x) - 1 for x in xs]), lasts.split(1), strict=True):
        close(torch.cat((first, last)), oracle(kind, x))


@every_kind
@pytest.mark.parametrize("back", range(1, 10))
def test_rolling_back_inside_and_across_blocks(kind, back):
    """A draft of ``back`` tokens is rejected: what comes after equals a run that never had it."""
    x, cache = hidden(34), new_cache(kind)
    run(ours(kind), x[:22], cache)
    run(ours(kind), hidden(back, seed=9), cache)
    cache.truncate(22)
    got = torch.cat([run(ours(kind), piece, cache) for piece in x[22:].split(5)])
    close(got, oracle(kind, x)[22:])


@every_kind
def test_an_interrupted_step_leaves_no_trace(kind):
    x, cache = hidden(30), new_cache(kind)
    run(ours(kind), x[:17], cache)
    run(ours(kind), hidden(11, seed=4), cache, commit=False)
    close(run(ours(kind), x[17:], cache), oracle(kind, x)[17:])


@every_kind
def test_a_fork_goes_its_own_way(kind):
    x, cache = hidden(30), new_cache(kind, n_sequences=2)
    run(ours(kind), x[:18], cache)
    cache.fork(0, 1)
    run(ours(kind), hidden(6, seed=2), cache)
    close(run(ours(kind), x[18:], cache, {1: 12}), oracle(kind, x)[18:])


def test_rolling_back_too_far_says_so():
    cache = new_cache("hca", capacity_tokens=128)
    run(ours("hca"), hidden(90), cache)
    with pytest.raises(ValueError, match=r"sequence 0 to 40 tokens: .* It can go back 32 tokens, to 58"):
        cache.truncate(40)


def test_the_open_block_is_kept_in_float32_whatever_the_model_is():
    cache = type(new_cache("csa"))([entries_of(layer_config("csa"))], capacity_tokens=64, dtype=torch.bfloat16)
    dtypes = {name: rows.dtype for name, rows in cache.store[0].items()}
    assert dtypes == {
        "kv": torch.bfloat16,
        "row": torch.bfloat16,
        "row_open": torch.float32,
        "index": torch.bfloat16,
        "index_open": torch.float32,
    }


class _Largest(TorchDispatchMode):
    """The number of values of the largest tensor that an operation makes."""

    n_values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.n_values = max(self.n_values, tensor.numel())
        return out


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_no_tensor_is_as_large_as_tokens_by_tokens(kind):
    n = 2600
    x, cache = hidden(n), new_cache(kind, capacity_tokens=n)
    with _Largest() as largest:
        run(ours(kind), x, cache)
    assert largest.n_values < n * n / 2


def test_a_tiny_hybrid_runs_through_the_pipeline():
    """Window-only, CSA and HCA layers over a mixture of experts: with a cache, without one, rolled back."""
    model = labkit.load("random:tiny-hybrid")
    assert {layer.attention.rate for layer in model.config.layers} == {0, 4, 16}
    runs = [
        labkit.Pipeline(model, kv_cache=kind).generate("Once upon a time. " * 4, max_new_tokens=20, ignore_eos=True)
        for kind in ("contiguous", "none")
    ]
    assert runs[0].token_ids == runs[1].token_ids
    assert runs[0].trace.coverage > 0.9
    ids = list(range(70))
    cache = new_cache_of(model, 128)
    model(ids, cache)
    model([5, 6, 7, 8, 9], cache)
    cache.truncate(70)
    close(model([11, 12], cache), model([*ids, 11, 12])[-2:])


def new_cache_of(model, capacity_tokens):
    return ContiguousCache(model.transformer.cache_entries, capacity_tokens=capacity_tokens)
