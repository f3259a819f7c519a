"""Every kind against attention written out: prompts, decoding, drafts, ragged batches, roll-back, interruption."""

from __future__ import annotations

import pytest
import torch

from labkit.kvcache import Sliding, sliding
from tests.kvcache.drive import BLOCKED, KINDS, LOSSLESS, LOSSY, Driver, attention, build, layer

BOUND = {"int8": 0.03, "int4": 0.4}
"""Largest error of an attention output over standard normal keys and values, whose outputs are of size 1."""


def bound(name: str) -> float:
    return 2e-6 if name in LOSSLESS else BOUND["int8" if "int8" in name else "int4"]


@pytest.mark.parametrize("name", KINDS)
def test_prompt_then_decoding(name):
    driver = Driver(build(name, [layer(), layer(window=9)]))
    for n in (70, *[1] * 40, 3, 40, 1, 1):
        driver.step(n)
    assert driver.worst < bound(name)
    if name in LOSSY and driver.cache.n_blocked(0):
        assert driver.worst > 1e-4, "a lossy kind that loses nothing stores something else than it says"


@pytest.mark.parametrize("name", KINDS)
def test_token_by_token_from_nothing(name):
    driver = Driver(build(name, [layer()], capacity_tokens=80))
    for _ in range(80):
        driver.step(1)
    assert driver.worst < bound(name)


@pytest.mark.parametrize("name", KINDS)
def test_several_sequences_in_one_step(name):
    driver = Driver(build(name, [layer(window=30), layer()], n_sequences=3, capacity_tokens=160))
    driver.step({7: 40})
    driver.step({7: 1, 2: 25})  # one decodes while another's prompt comes in
    for _ in range(20):
        driver.step({2: 1, 7: 1})
    driver.step({9: 3, 7: 1, 2: 2})
    driver.cache.free(7)
    driver.step({4: 50, 9: 1})
    assert driver.worst < bound(name)
    assert [driver.cache.n_tokens(s) for s in (2, 4, 7, 9)] == [47, 50, 0, 4]


@pytest.mark.parametrize("name", KINDS)
def test_rejected_drafts_are_rolled_back(name):
    driver = Driver(build(name, [layer()], capacity_tokens=200))
    driver.step(100)
    for accepted in (0, 3, 5, 1, 4, 2, 0, 5):
        n = driver.cache.n_tokens()
        driver.step(5)
        driver.cache.truncate(n + accepted)
    driver.step(1)
    assert driver.cache.n_tokens() == 121
    assert driver.worst < bound(name)


@pytest.mark.parametrize("name", KINDS)
def test_deep_truncation_and_a_new_continuation(name):
    driver = Driver(build(name, [layer()], capacity_tokens=200))
    driver.step(120)
    for n in (117, 70, 64, 33, 0):
        driver.cache.truncate(n)
        assert driver.cache.n_tokens() == n
        driver.step(20)
        driver.step(1)
    assert driver.worst < bound(name)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("n_new", [1, 6, 90])
def test_an_interrupted_step_changes_nothing(name, n_new):
    def outputs(interrupt: bool) -> list[float]:
        driver = Driver(build(name, [layer(), layer()], capacity_tokens=300))
        for n in (50, 1, 1):
            driver.step(n)
        if interrupt:
            cache = driver.cache
            cache.begin(n_new)
            cache.append(0, k=torch.full((n_new, 2, 16), 9.0), v=torch.full((n_new, 2, 16), 9.0))
            cache.attend(0, torch.ones(n_new, 4, 16), scale=0.25)
            cache.begin({5: 1}) if cache.n_sequences > 1 else None
        assert driver.cache.n_tokens() == 52
        for n in (1, 2, 60, 1):
            driver.step(n)
        return [driver.worst]

    assert outputs(True) == outputs(False)


@pytest.mark.parametrize("name", ["contiguous", *BLOCKED])
def test_fork(name):
    driver = Driver(build(name, [layer(), layer(window=20)], n_sequences=3, capacity_tokens=160))
    driver.step(75)
    for target in (1, 2):
        driver.cache.fork(0, target)
        for layer_idx in range(2):
            driver.k[target, layer_idx], driver.v[target, layer_idx] = driver.k[0, layer_idx], driver.v[0, layer_idx]
    for _ in range(40):
        driver.step({0: 1, 2: 1, 1: 1})
    driver.cache.free(0)
    driver.step({1: 30, 2: 1})
    assert driver.worst < bound(name)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("heads", [(1, 1), (1, 7), (3, 9), (4, 4), (2, 10), (1, 16)], ids="{0[0]}of{0[1]}".format)
def test_heads(name, heads):
    n_groups, n_heads = heads
    driver = Driver(build(name, [layer(n_groups, 32)], capacity_tokens=100), n_heads=n_heads)
    for n in (70, 1, 2, 1):
        driver.step(n)
    assert driver.worst < bound(name)


@pytest.mark.parametrize("name", [*BLOCKED, "contiguous", "sliding-own"])
def test_widths_that_no_kernel_serves(name):
    driver = Driver(build(name, [layer(2, 6, 10)], capacity_tokens=100))
    for n in (70, 1, 2, 1):
        driver.step(n)
    assert driver.worst < 1.5 * bound(name)


@pytest.mark.parametrize("name", KINDS)
def test_values_wider_than_keys_soft_capping_and_sinks(name):
    driver = Driver(build(name, [layer(2, 16, 48), layer(2, 32, 16, window=12, n_sinks=3)]), softcap=4.0)
    for n in (60, 1, 4, 1, 20, 1):
        driver.step(n)
    assert driver.worst < bound(name)


@pytest.mark.parametrize("name", KINDS)
def test_bfloat16(name):
    driver = Driver(build(name, [layer(2, 32)], dtype=torch.bfloat16))
    for n in (70, 1, 1, 4):
        driver.step(n)
    assert driver.worst < bound(name) + 0.02


# --- the sliding kind forgets: compare with attention over what it says it keeps


@pytest.mark.parametrize("config", [Sliding(16, 4), Sliding(16, 0), Sliding(64, 2)], ids=str)
def test_sliding_sees_the_sinks_and_the_window(config):
    layers = [layer(), layer(window=8)]
    cache = sliding.SlidingCache(layers, capacity_tokens=400, config=config)
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 400, 2, 16, generator=generator), torch.randn(2, 400, 2, 16, generator=generator)
    q = torch.randn(2, 400, 4, 16, generator=generator)
    done = 0
    for n in (150, *[1] * 60, 5, 33, 100, 1, 1):
        cache.begin(n)
        rows = slice(done, done + n)
        for i in range(2):
            cache.append(i, k=k[i, rows], v=v[i, rows])
            out = cache.attend(i, q[i, rows], scale=0.25)
            sight = {"window": 8} if i else {"window": config.window, "n_sinks": config.n_sinks}
            past = slice(done + n)
            expected = attention(q[i, rows], k[i, past], v[i, past], range(done, done + n), scale=0.25, **sight)
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
        cache.commit()
        done += n
        if done == 200:  # a rejected draft, inside what can be rolled back
            cache.truncate(180)
            done = 180
    assert cache.nbytes < 2 * 400 * 2 * 2 * 16 * 4


def test_sliding_knows_when_it_loses_nothing():
    def lossless(layers, config, capacity=500):
        return sliding.SlidingCache(layers, capacity_tokens=capacity, config=config).lossless

    assert lossless([layer(window=8)], Sliding(16))
    assert lossless([layer(), layer(window=8)], Sliding(0))
    assert not lossless([layer(), layer(window=8)], Sliding(64))
    assert lossless([layer()], Sliding(512))
