"""Common beginnings are stored once; whoever writes gets a block of its own."""

from __future__ import annotations

import pytest
import torch

from labkit.kvcache import CacheFull, Paged, Segment
from labkit.kvcache.paged import PagedCache, build
from tests.kvcache.drive import Driver, layer

SYSTEM = list(range(100, 140))  # 40 tokens: two whole blocks of 16 and a half


def cache_of(n_blocks: int = 0, dtype: str = "model", sequences: int = 4):
    return build(Paged(n_blocks=n_blocks, dtype=dtype), [layer()], capacity_tokens=96, n_sequences=sequences)


def write(cache, sequence_id: int, n: int, fill: float = 0.0) -> None:
    cache.begin({sequence_id: n})
    entry = torch.full((n, 2, 16), fill)
    cache.append(0, k=entry, v=entry)
    cache.commit()


def test_a_prefix_is_adopted_by_content():
    cache = cache_of()
    assert cache.adopt([*SYSTEM, 1, 2], 0) == 0  # nobody has written it yet
    write(cache, 0, 42)
    assert cache.adopt([*SYSTEM, 9, 9, 9], 1) == 32
    assert cache.block_ids(1) == cache.block_ids(0)[:2]
    write(cache, 1, 11)
    assert cache.allocator.n_used == 4
    assert cache.adopt([*SYSTEM[:5], 0, *SYSTEM[6:]], 2) == 0  # a different token: everything after it differs


def test_a_prefix_outlives_its_sequence_until_the_blocks_are_needed():
    cache = cache_of(n_blocks=6)
    cache.adopt(SYSTEM, 0)
    write(cache, 0, 40)
    cache.free(0)
    assert cache.allocator.n_free == 6
    assert cache.adopt(SYSTEM, 1) == 32
    cache.free(1)
    write(cache, 2, 96)  # takes all six blocks
    cache.free(2)
    assert cache.adopt(SYSTEM, 3) == 0


def test_the_last_token_is_always_left_to_compute():
    cache = cache_of()
    cache.adopt(SYSTEM[:32], 0)
    write(cache, 0, 32)
    assert cache.adopt(SYSTEM[:32], 1) == 16


def test_generated_tokens_are_shared_when_they_are_noted():
    cache = cache_of()
    cache.adopt(SYSTEM, 0)
    write(cache, 0, 40)
    for token_id in range(8):
        cache.note([token_id], 0)
        write(cache, 0, 1)
    assert cache.adopt([*SYSTEM, *range(8), 5], 1) == 48


def test_copy_on_write_leaves_the_other_alone():
    cache = PagedCache([layer()], capacity_tokens=96, n_sequences=2, config=Paged())
    write(cache, 0, 20, fill=1.0)
    cache.fork(0, 1)
    assert cache.block_ids(0) == cache.block_ids(1)
    write(cache, 1, 1, fill=2.0)
    assert cache.block_ids(0)[0] == cache.block_ids(1)[0]
    assert cache.block_ids(0)[1] != cache.block_ids(1)[1]
    k, _, _ = cache.dense(0, Segment(1, 0, 0, 21))
    assert k[0, :, 0].tolist() == [1.0] * 20 + [2.0]
    write(cache, 0, 1, fill=3.0)
    k, _, _ = cache.dense(0, Segment(0, 0, 0, 21))
    assert k[0, :, 0].tolist() == [1.0] * 20 + [3.0]


def test_a_block_that_is_rewritten_is_no_longer_found():
    cache = cache_of()
    cache.adopt(SYSTEM, 0)
    write(cache, 0, 40)
    cache.truncate(20, 0)
    cache.note([7] * 20, 0)
    write(cache, 0, 20)
    assert cache.adopt(SYSTEM, 1) == 16
    cache.free(1)
    assert cache.adopt(SYSTEM[:20] + [7] * 20, 1) == 32


def test_quantised_blocks_are_shared_too():
    cache = build(Paged(dtype="int8"), [layer()], capacity_tokens=160, n_sequences=2)
    text = list(range(120))
    cache.adopt(text, 0)
    driver = Driver(cache)
    driver.step(120)
    n = cache.adopt(text, 1)
    assert n == 80  # 120 tokens less the recent 32, in whole blocks of 16
    driver.k[1, 0], driver.v[1, 0] = driver.k[0, 0][:n], driver.v[0, 0][:n]
    driver.step({1: 40})
    driver.step({0: 1, 1: 1})
    assert driver.worst < 0.03
    assert cache.block_ids(0)[:5] == cache.block_ids(1)[:5]


def test_a_step_that_does_not_fit_takes_nothing():
    cache = cache_of(n_blocks=4)
    write(cache, 0, 50)
    with pytest.raises(CacheFull, match=r"0 of its 4 blocks of 16 tokens free and this step needs 2"):
        cache.begin({0: 1, 1: 20})
    assert cache.allocator.n_free == 0
    assert cache.n_tokens(0) == 50
    write(cache, 0, 14)
    cache.free(0)
    write(cache, 1, 20)
