"""Appending moves one row: no step allocates anything near the size of the cache, whatever the cache holds."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.kvcache import Sliding, sliding
from tests.kvcache.drive import KINDS, build, layer

N_TOKENS, G, D = 2048, 2, 32
HALF_OF_K = N_TOKENS * G * D * 4 // 2


class LargestAllocation(TorchDispatchMode):
    """The most bytes that one operation's new result took; views of what is there do not count."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for result in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
                self.nbytes = max(self.nbytes, result.untyped_storage().nbytes())
        return out


def fill(cache, n: int) -> None:
    for start in range(0, n, 256):
        cache.begin(256)
        k = torch.randn(min(256, n - start), G, D)
        cache.append(0, k=k, v=k)
        cache.commit()


def largest(cache, step) -> int:
    with LargestAllocation() as watch:
        step()
    return watch.nbytes


@pytest.mark.parametrize("name", KINDS)
def test_append_copies_nothing_large(name):
    cache = build(name, [layer(G, D)], capacity_tokens=N_TOKENS + 300)
    fill(cache, N_TOKENS)
    addresses = [t.data_ptr() for store in cache.store for t in store.values()]
    k = torch.randn(1, G, D)

    def steps() -> None:
        for _ in range(70):  # more than a group: what leaves the recent window is quantised on the way
            cache.begin(1)
            if name != "offloaded":  # which fetches a layer's rows by design
                cache.append(0, k=k, v=k)
            cache.commit()

    assert largest(cache, steps) < HALF_OF_K
    assert [t.data_ptr() for store in cache.store for t in store.values()] == addresses


@pytest.mark.parametrize("name", [name for name in KINDS if name != "offloaded"])
def test_a_decode_step_rebuilds_no_k_and_v(name):
    cache = build(name, [layer(G, D)], capacity_tokens=N_TOKENS + 300)
    fill(cache, N_TOKENS)
    k, q = torch.randn(1, G, D), torch.randn(1, 4, D)

    def step() -> None:
        cache.begin(1)
        cache.append(0, k=k, v=k)
        cache.attend(0, q, scale=0.2)
        cache.commit()

    step()
    whole = N_TOKENS * G * D * 4
    # PyTorch reads 512 tokens at a time, in float32 on the way: a bounded piece, whatever the length.
    assert largest(cache, step) < whole


def test_the_watch_sees_a_copy():
    """The same step with K copied as a whole, as `torch.cat` does: it must be noticed."""
    old, new = torch.randn(G, N_TOKENS, D), torch.randn(G, 1, D)
    assert largest(None, lambda: torch.cat((old, new), dim=1)) > HALF_OF_K


def test_sliding_allocates_no_more_as_the_text_grows():
    cache = sliding.SlidingCache([layer(G, D)], capacity_tokens=4096, config=Sliding(128, 4))
    fill(cache, 512)
    k, q = torch.randn(1, G, D), torch.randn(1, 4, D)

    def step() -> None:
        cache.begin(1)
        cache.append(0, k=k, v=k)
        cache.attend(0, q, scale=0.2)
        cache.commit()

    step()
    early = largest(cache, step)
    fill(cache, 2048)
    assert largest(cache, step) <= 1.2 * early
