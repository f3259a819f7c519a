"""Predicted bytes equal allocated ones, found by walking over everything that the cache holds."""

from __future__ import annotations

import gc
from types import FunctionType, ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import registry
from labkit.kvcache import Entry, Int4, Int8, LayerEntries, Paged, Sliding
from labkit.kvcache.offloaded import OffloadedCache
from tests.kvcache.drive import KINDS, Driver, build, layer


def tensors_of(root: object) -> dict[int, torch.Tensor]:
    """Every tensor that can be reached from an object, by the address of its storage."""
    found, seen, queue = {}, set(), [root]
    while queue:
        thing = queue.pop()
        if id(thing) in seen or isinstance(thing, (type, ModuleType, FunctionType, str, int, float)):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            if thing.numel():
                found[thing.untyped_storage().data_ptr()] = thing
            continue
        queue += gc.get_referents(thing)
    return found


def predicted(name: str, layers, **sizes) -> int:
    if name == "offloaded":
        return OffloadedCache.predict_nbytes(layers, **sizes)
    _, config = registry.find("kv_cache", KINDS.get(name, name))
    return type(build(name, layers, capacity_tokens=1)).predict_nbytes(layers, config=config, **sizes)


MODELS = {
    "smollm2-135m": [layer(3, 64)] * 3,
    "gemma-like": [layer(1, 256, window=32), layer(1, 256, window=32), layer(1, 256)],
    "odd": [layer(5, 24, 40)],
}


@pytest.mark.parametrize("name", ["none", "sliding", *KINDS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sizes", [(1, 1), (100, 1), (257, 3)], ids=str)
def test_predicted_equals_allocated(name, dtype, model, sizes):
    asked = {"capacity_tokens": sizes[0], "n_sequences": sizes[1], "dtype": dtype}
    cache = build(name, MODELS[model], **asked)
    real = sum(t.untyped_storage().nbytes() for t in tensors_of(cache).values())
    assert predicted(name, MODELS[model], **asked) == cache.nbytes == real


@pytest.mark.parametrize("name", ["sliding", *KINDS])
def test_nothing_is_allocated_later(name):
    driver = Driver(build(name, [layer()], capacity_tokens=300, n_sequences=2))
    before = {address: t.nbytes for address, t in tensors_of(driver.cache).items()}
    for step in (150, {1: 3}, {0: 1, 1: 1}, *[{0: 1}] * 40):
        driver.step(step, check=False)
    held = {t.untyped_storage().data_ptr() for t in tensors_of(driver.cache).values() if t.nbytes >= 4096}
    assert held <= set(before), "the storage moved or grew"
    assert driver.cache.nbytes == sum(before.values())


@settings(max_examples=60, deadline=None)
@given(
    config=st.one_of(
        st.builds(Int8, group=st.sampled_from((16, 32, 64)), recent=st.sampled_from((0, 32, 64, 128))),
        st.builds(Int4, group=st.sampled_from((16, 32, 64)), recent=st.sampled_from((0, 32, 64, 128))),
        st.builds(
            Paged,
            block_size=st.sampled_from((8, 16, 32, 64)),
            dtype=st.sampled_from(("model", "int8", "int4")),
            n_blocks=st.integers(0, 50),
        ),
        st.builds(Sliding, window=st.integers(0, 200), n_sinks=st.integers(0, 64)),
    ),
    capacity=st.integers(1, 400),
    n_sequences=st.integers(1, 3),
    g=st.integers(1, 4),
    d=st.integers(1, 40).map(lambda n: 2 * n),
)
def test_predicted_equals_allocated_for_any_sizes(config, capacity, n_sequences, g, d):
    layers = [layer(g, d), layer(g, d, window=16)]
    component, config = registry.find("kv_cache", config)
    sizes = {"capacity_tokens": capacity, "n_sequences": n_sequences}
    cache = component.build(config, layers=layers, **sizes)
    real = sum(t.untyped_storage().nbytes() for t in tensors_of(cache).values())
    assert type(cache).predict_nbytes(layers, config=config, **sizes) == cache.nbytes == real


def test_hand_computed():
    """One layer, 2 heads of 64, 4096 tokens, fp32: from the definitions, on paper."""
    layers = [LayerEntries((Entry("k", (2, 64)), Entry("v", (2, 64))))]
    size = {"capacity_tokens": 4096}
    assert build("contiguous", layers, **size).nbytes == 2 * 2 * 64 * 4096 * 4
    assert build("paged", layers, **size).nbytes == 2 * 2 * 64 * 4096 * 4 + 256 * 4
    # int8, group 32, recent 32: 127 blocks of 32 tokens; 1 byte a number; 4 bytes for each key channel of a block and
    # for each of a value's two runs of 32; a ring of 96 tokens in fp32
    block = 2 * (32 * 128 + 4 * 64 + 4 * 32 * 2)
    assert build("int8", layers, **size).nbytes == 127 * block + 96 * 2 * 128 * 4 + 127 * 4


def test_usage_contiguous_and_paged():
    tokens = {0: 100, 1: 5, 2: 33}
    a_token = 2 * 2 * 16 * 4
    for name in ("contiguous", "paged"):
        driver = Driver(build(name, [layer()], capacity_tokens=160, n_sequences=4))
        driver.step(tokens, check=False)
        usage = driver.cache.usage()
        assert usage.n_tokens == 138
        assert usage.held_bytes == 138 * a_token
        reserved = 3 * 160 if name == "contiguous" else 16 * (7 + 1 + 3)
        assert usage.reserved_bytes == reserved * a_token
        assert usage.waste == pytest.approx(1 - 138 / reserved)
        assert usage.free_bytes == usage.nbytes - usage.reserved_bytes


def test_usage_counts_a_shared_block_once():
    driver = Driver(build("paged", [layer()], capacity_tokens=160, n_sequences=4))
    driver.step(64, check=False)
    alone = driver.cache.usage()
    driver.cache.fork(0, 1)
    shared = driver.cache.usage()
    assert shared.held_bytes == alone.held_bytes
    assert shared.n_tokens == 2 * alone.n_tokens
    assert shared.shared_bytes == 64 * 2 * 2 * 16 * 4


def test_usage_sliding_stops_growing():
    driver = Driver(build("sliding", [layer(window=16)], capacity_tokens=500))
    held = []
    for n in (10, 100, 100, 100):
        driver.step(n, check=False)
        held.append(driver.cache.usage().held_bytes)
    assert held[1] == held[2] == held[3] == driver.cache.nbytes
    assert held[0] < held[1]
