"""Bad use is told so, and nothing is corrupted by it."""

from __future__ import annotations

import threading

import pytest

from labkit import registry
from labkit.kvcache import CacheFull, Entry, LayerEntries, Sliding, sliding
from tests.kvcache.drive import KINDS, Driver, build, layer


@pytest.mark.parametrize("name", ["none", "sliding", *KINDS])
def test_too_small(name):
    driver = Driver(build(name, [layer()], capacity_tokens=20))
    with pytest.raises(CacheFull, match=r"cache holds 20 tokens a sequence; sequence 0 has \d+ and 21 more do not fit"):
        driver.cache.begin(21)
    driver.step(20)
    if name != "none":
        with pytest.raises(CacheFull, match="larger capacity_tokens"):
            driver.cache.begin(1)
        assert driver.cache.n_tokens() == 20


@pytest.mark.parametrize("name", ["sliding", *KINDS])
def test_too_many_sequences(name):
    driver = Driver(build(name, [layer()], n_sequences=2))
    driver.step({0: 3, 1: 3}, check=False)
    with pytest.raises(CacheFull, match="holds 2 sequences, all in use"):
        driver.cache.begin({0: 1, 2: 1})
    with pytest.raises(CacheFull, match="holds 2 sequences"):
        build(name, [layer()], n_sequences=2).begin({0: 1, 1: 1, 2: 1})
    driver.cache.free(1)
    driver.step({0: 1, 2: 5}, check=False)


@pytest.mark.parametrize("name", ["sliding", *(name for name in KINDS if name != "contiguous")])
@pytest.mark.parametrize(
    "entries",
    [
        LayerEntries((Entry("latent", (576,)),)),
        LayerEntries((Entry("k", (2, 16)), Entry("v", (4, 16)))),
        LayerEntries((Entry("k", (2, 16), rate=4), Entry("v", (2, 16), rate=4))),
    ],
    ids=["latent", "unequal", "compressed"],
)
def test_entries_that_do_not_fit_the_kind(name, entries):
    with pytest.raises(ValueError, match=r"layer 1 keeps .* Choose a cache made for this attention"):
        build(name, [layer(), entries])


def test_odd_heads_do_not_fit_int4():
    with pytest.raises(ValueError, match=r"heads of \[15, 15\] dims, and two int4 codes share a byte: use int8"):
        build("int4", [layer(2, 15)])


@pytest.mark.parametrize("name", ["sliding", *KINDS])
def test_truncation_cannot_invent_history(name):
    driver = Driver(build(name, [layer()]))
    driver.step(10, check=False)
    for n in (11, -1):
        with pytest.raises(ValueError, match=f"cannot truncate sequence 0 to {n} tokens: it has 10"):
            driver.cache.truncate(n)


def test_truncation_past_an_eviction():
    cache = sliding.SlidingCache([layer()], capacity_tokens=300, config=Sliding(16, 4))
    driver = Driver(cache)
    driver.step(50, check=False)
    cache.truncate(3)  # nothing was evicted yet: 50 tokens fit 4 + 16 + 32 rows
    driver.step(197, check=False)
    with pytest.raises(ValueError, match=r"to 167 tokens: the sliding cache has evicted .* 32 tokens, to 168"):
        cache.truncate(167)
    assert cache.n_tokens() == 200
    cache.truncate(168)
    with pytest.raises(ValueError, match="to 168"):  # truncation brings nothing back
        cache.truncate(160)
    cache.truncate(0)
    driver.step(5)


@pytest.mark.parametrize("name", ["none", "sliding", *KINDS])
def test_two_runs_on_one_cache(name):
    driver = Driver(build(name, [layer()]))
    driver.step(5, check=False)
    inside, done = threading.Event(), threading.Event()

    def other_run() -> None:
        driver.cache.begin(1)
        inside.set()
        done.wait(10)

    thread = threading.Thread(target=other_run, name="the-other-run")
    thread.start()
    assert inside.wait(10)
    try:
        for use in (lambda: driver.cache.begin(1), lambda: driver.cache.truncate(0), driver.cache.reset):
            with pytest.raises(RuntimeError, match=r"in the middle of a step of another run .the-other-run."):
                use()
    finally:
        done.set()
        thread.join()
    driver.step(2, check=False)  # the other run is gone: its open step does not count


@pytest.mark.parametrize("name", [name for name in KINDS if "sliding" not in name])
def test_fork_says_what_is_wrong(name):
    driver = Driver(build(name, [layer()], n_sequences=2))
    driver.step({0: 3, 1: 3}, check=False)
    with pytest.raises(ValueError, match="fork"):
        driver.cache.fork(7, 8)
    with pytest.raises(ValueError, match="sequence"):
        driver.cache.fork(0, 1)


def test_kinds_that_cannot_fork():
    with pytest.raises(ValueError, match="sliding cache cannot fork"):
        build("sliding", [layer()]).fork(0, 1)


def test_offloaded_says_why_it_is_not_here():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device, so offloading is on offer")
    info = {info.name: info for info in registry.components("kv_cache")}["offloaded"]
    assert "no CUDA device" in info.unavailable
    with pytest.raises(ValueError, match=r"offloaded' is not available here: .* no CUDA device"):
        registry.find("kv_cache", "offloaded")


@pytest.mark.parametrize("sizes", [{"capacity_tokens": 0}, {"capacity_tokens": 5, "n_sequences": 0}])
def test_sizes_below_one(sizes):
    with pytest.raises(ValueError, match="must be at least 1"):
        build("contiguous", [layer()], **sizes)
