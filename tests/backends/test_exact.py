"""A token's logits are the same bits computed alone, in a prompt, in a chunk, in a batch, and in the check of a
draft."""

from __future__ import annotations

import pytest
import torch

from labkit.backends.fused_step import FusedStep
from labkit.perf.timer import NULL_TIMER
from labkit.quant import W8A8, Int4, Int8
from tests.kernels.caches import CACHES, build_cache
from tests.kernels.compare import cache_for, quantize
from tests.kernels.families import FAMILIES, long_config, random_model

OPTIONS = {"timer": NULL_TIMER, "should_stop": lambda: False}
WEIGHTS = [None, Int8(), W8A8(), Int4(group_size=32, head="int4")]
WHOLE = ["none", "contiguous", "paged", "sliding", "sliding, layers' own"]
"""Caches that lose nothing, for as long as a window that forgets has forgotten nothing."""
N = 21


def logits_of(step, ids, sizes, start=0, counts_of=lambda n: None):
    """Logits after every token of ``ids`` from ``start`` on, in steps of ``sizes`` tokens."""
    out, at = [], start
    for n in sizes:
        out.append(step(ids[at : at + n], counts=counts_of(n), rows="all", **OPTIONS))
        at += n
    return torch.cat(out)


def ways(transformer, make, ids, n_threads=2, history=True):
    """The same tokens' logits, by how they were computed."""
    n, found = len(ids), {}

    def step(threads=n_threads):
        return FusedStep(transformer, make(), threads)

    found["in a prompt"] = logits_of(step(), ids, [n])
    found["on one thread"] = logits_of(step(1), ids, [n])
    if not history:
        found["alone"] = torch.cat([logits_of(step(), ids[: i + 1], [i + 1])[-1:] for i in range(n)])
        return found
    found["alone"] = logits_of(step(), ids, [1] * n)
    found["alone, on three threads"] = logits_of(step(3), ids, [1] * n)
    found["in chunks"] = logits_of(step(), ids, [n - 13, 2, 1, 10])
    checked, at = step(), n - 6  # a draft is checked, half of it rejected, another checked
    head = logits_of(checked, ids, [at])
    logits_of(checked, torch.tensor([5, 4, 3, 2, 1]), [5])
    checked.cache.truncate(at + 2)
    checked.cache.truncate(at)
    found["in the check of a draft"] = torch.cat((head, logits_of(checked, ids, [2, 4], start=at)))
    return found


def together(transformer, make, ids):
    """The same tokens beside others': single tokens, then a chunk beside single tokens."""
    step, others = FusedStep(transformer, make(), 2), torch.arange(100).flip(0)
    step(torch.cat((ids[:4], others[:9])), counts={0: 4, 1: 9}, **OPTIONS)
    rows = []
    for i in range(4, 8):
        rows.append(step(torch.stack((others[i], ids[i])), counts={1: 1, 0: 1}, rows="all", **OPTIONS)[1:])
    chunk = torch.cat((others[:1], ids[8:], others[2:4]))
    rows.append(step(chunk, counts={1: 1, 0: len(ids) - 8, 2: 2}, rows="all", **OPTIONS)[1:-2])
    return torch.cat(rows)


def same(found):
    first, *rest = found
    return [name for name in rest if not torch.equal(found[name], found[first])]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "long"])
def test_on_every_family_and_weight_format(family, weights):
    transformer = quantize(random_model(FAMILIES[family]), weights)
    ids = torch.arange(N) * 7 % 101
    with torch.inference_mode():
        found = ways(transformer, lambda: cache_for(transformer), ids)
        beside = together(transformer, lambda: cache_for(transformer, n_sequences=3), ids)
    assert same(found) == []
    assert torch.equal(beside, found["alone"][4:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_on_every_cache_that_loses_nothing(name, dtype):
    family = "gemma2" if name == "sliding, layers' own" else "llama"
    transformer = quantize(random_model(FAMILIES[family]).to(dtype), Int8())
    ids = torch.arange(16 if name == "sliding" else N) * 7 % 101
    with torch.inference_mode():
        contiguous = logits_of(FusedStep(transformer, cache_for(transformer, dtype), 2), ids, [len(ids)])
        found = ways(transformer, lambda: build_cache(name, transformer, dtype), ids, history=name != "none")
        assert same({"contiguous": contiguous} | found) == []
        if name != "none":
            beside = together(transformer, lambda: build_cache(name, transformer, dtype, n_sequences=3), ids)
            assert torch.equal(beside, contiguous[4:])


@pytest.mark.parametrize("name", [name for name in CACHES if "int" in name])
def test_codes_are_exact_until_a_block_is_rounded(name):
    """Tokens after the same past are the same bits alone, in a batch and in a check. A prompt attends to its own tokens
    as they are, a later step to their codes: there the difference is what rounding makes, and no more."""
    transformer = quantize(random_model(FAMILIES["llama"]), Int8())
    ids = torch.arange(80) * 7 % 101
    with torch.inference_mode():
        outs = []
        for sizes in ([1] * 6, [6], [2, 1, 3]):
            step = FusedStep(transformer, build_cache(name, transformer, n_sequences=2), len(sizes))
            logits_of(step, ids, [66])
            outs.append(logits_of(step, ids, sizes, start=66))
            step.cache.truncate(66)
            step(ids[:9], counts={1: 9}, **OPTIONS)
            beside = [step(torch.stack((ids[3], ids[at])), counts={1: 1, 0: 1}, **OPTIONS)[1:] for at in range(66, 72)]
            assert torch.equal(torch.cat(beside), outs[-1])
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], outs[2])
        alone, prompt = (
            logits_of(FusedStep(transformer, build_cache(name, transformer), 2), ids, sizes)
            for sizes in ([1] * 80, [80])
        )
    bound = 0.3 if "int4" in name else 0.03
    assert 0 < (alone - prompt).abs().max() <= bound * prompt.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["contiguous", "paged"])
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(5, 1), (4, 4)])
def test_over_several_tiles_of_keys(name, n_heads, n_kv_heads, dtype, monkeypatch):
    transformer = random_model(long_config(n_heads, n_kv_heads, d_head=32), dtype=dtype)
    monkeypatch.setattr("tests.kernels.caches.CAPACITY", 300)
    ids = torch.arange(290) * 7 % 101
    with torch.inference_mode():
        found = {
            sizes: logits_of(FusedStep(transformer, build_cache(name, transformer, dtype), threads), ids, sizes)[-6:]
            for sizes, threads in [
                ((290,), 2),
                ((120, 164, 1, 1, 1, 1, 1, 1), 3),
                ((283, 1, 5, 1), 1),
                ((7, 200, 83), 2),
            ]
        }
    first, *rest = found.values()
    assert all(torch.equal(first, other) for other in rest)
