"""Whatever rides along, a request's tokens are those it gets alone; and whatever happens, no block is lost."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labkit import Sampling
from labkit.kvcache import Paged
from labkit.pipeline import Pipeline
from labkit.serving import ChunkedPrefill, Continuous, Service, Static

BEGINNINGS = ("", "The quick brown fox jumps over ", "The quick brown fox sleeps under the lazy dog, ")
ENDINGS = ("a", "the lazy dog", "who knows what else it may find there")
SAMPLINGS = (Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=9, repetition_penalty=1.3))

asked = st.fixed_dictionaries(
    {
        "prompt": st.tuples(st.sampled_from(BEGINNINGS), st.sampled_from(ENDINGS)).map("".join),
        "max_new_tokens": st.integers(1, 14),
        "sampling": st.sampled_from(SAMPLINGS),
        "seed": st.integers(0, 2),
    }
)
ride = st.fixed_dictionaries(
    {
        "asked": asked,
        "priority": st.integers(0, 1),
        "user": st.sampled_from("ab"),
        "arrives_at": st.integers(0, 12),
        "leaves_at": st.one_of(st.none(), st.none(), st.integers(1, 20)),
    }
)
schedulers = st.one_of(
    st.builds(Static, max_requests=st.integers(1, 4)),
    st.builds(Continuous, max_requests=st.integers(1, 4), order=st.sampled_from(("arrival", "fair"))),
    st.builds(
        ChunkedPrefill,
        max_requests=st.integers(1, 4),
        token_budget=st.sampled_from((16, 32)),
        order=st.sampled_from(("arrival", "fair")),
        max_slowdown=st.sampled_from((0.0, 2.0)),
    ),
)
caches = st.builds(
    Paged,
    block_size=st.sampled_from((8, 16)),
    n_blocks=st.integers(14, 30),
    prefix_sharing=st.booleans(),
)


@pytest.fixture
def alone(model):
    @cache
    def tokens(prompt, max_new_tokens, sampling, seed):
        pipeline = Pipeline(model, backend="reference", sampling=sampling)
        return pipeline.generate(prompt, max_new_tokens=max_new_tokens, seed=seed).token_ids

    return tokens


def assert_nothing_is_held(service: Service) -> None:
    cache = service.engine.cache
    assert service.queues.waiting == service.queues.running == []
    assert cache.allocator.n_used == 0
    assert cache.allocator.n_free == cache.n_blocks
    assert sum(cache.allocator.references(block) for block in range(cache.n_blocks)) == 0
    assert all(cache.n_tokens(request.request_id) == 0 for request in service.requests)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rides=st.lists(ride, min_size=1, max_size=7), scheduler=schedulers, cache=caches)
def test_a_request_gets_the_tokens_that_it_gets_alone(model, alone, rides, scheduler, cache):
    service = Service(model, scheduler=scheduler, kv_cache=cache, backend="reference", start=False)
    submitted, n = {}, 0
    while True:
        for idx, one in enumerate(rides):
            if one["arrives_at"] == n:
                submitted[idx] = service.submit(**one["asked"], priority=one["priority"], user=one["user"])
            if one["leaves_at"] == n and idx in submitted:
                submitted[idx].sequence.stop_event.set()
        worked = service.step()
        n += 1
        if not worked and n > max(one["arrives_at"] for one in rides):
            break
        assert n < 2000, "the service does not come to an end"
    assert_nothing_is_held(service)
    for idx, request in submitted.items():
        done = service.handle(request).result(timeout=0)
        want = alone(**rides[idx]["asked"])
        if done.finish_reason == "cancelled":
            assert rides[idx]["leaves_at"] is not None
            assert done.token_ids == want[: len(done.token_ids)]
        else:
            assert done.token_ids == want


def test_blocks_that_run_out_are_taken_from_the_last_and_given_back(model, alone):
    """Three requests that need 33 blocks between them, on 14."""
    prompt = "The quick brown fox sleeps under the lazy dog"
    service = Service(
        model,
        scheduler=Continuous(max_requests=3),
        kv_cache=Paged(block_size=8, n_blocks=14, prefix_sharing=False),
        backend="reference",
        start=False,
    )
    requests = [service.submit(prompt, max_new_tokens=40, seed=seed, ignore_eos=True) for seed in range(3)]
    while service.step():
        pass
    assert service.queues.n_preemptions > 0
    assert requests[0].n_preempted == 0
    want = Pipeline(model, backend="reference").generate(prompt, max_new_tokens=40, ignore_eos=True).token_ids
    assert [request.sequence.token_ids for request in requests] == [want] * 3
    assert_nothing_is_held(service)


def test_guesses_change_no_token(model, alone):
    prompts = ("one two three one two three one two", "abababababab")
    service = Service(model, drafter="prompt-lookup", backend="reference", start=False)
    requests = [service.submit(prompt, max_new_tokens=14) for prompt in prompts]
    while service.step():
        pass
    assert [r.sequence.token_ids for r in requests] == [alone(prompt, 14, Sampling(), 0) for prompt in prompts]
    assert_nothing_is_held(service)


def test_ten_thousand_requests_with_cancels_leak_nothing(model, bookkeeping):
    chance = random.Random(5)
    service = Service(
        model,
        scheduler=ChunkedPrefill(max_requests=12, token_budget=64),
        kv_cache=Paged(n_blocks=40),
        max_waiting=10_000,
        start=False,
    )
    alive = []
    for n in range(10_000):
        head = "shared beginning of sixteen and more, " * chance.randint(0, 2)
        alive.append(
            service.submit(
                head + "x" * chance.randint(1, 40),
                max_new_tokens=chance.randint(1, 5),
                priority=chance.randint(0, 2),
                ignore_eos=True,
            )
        )
        if chance.random() < 0.1:
            chance.choice(alive[-30:]).sequence.stop_event.set()
        if n % 3 == 0:
            service.step()
    while service.step():
        pass
    assert_nothing_is_held(service)
    assert all(request.sequence.ended.is_set() for request in alive)
    n_cancelled = sum(request.sequence.finish_reason == "cancelled" for request in alive)
    assert 100 < n_cancelled <= 1300
    assert sum(request.sequence.finish_reason == "length" for request in alive) == 10_000 - n_cancelled
