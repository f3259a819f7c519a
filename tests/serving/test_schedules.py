"""What the policies do with a step, what a request leaves behind, and how requests come."""

from __future__ import annotations

import json
import math
import statistics
import threading
from itertools import pairwise

import numpy as np
import pytest

import labkit
from labkit.kvcache import Paged
from labkit.serving import ChunkedPrefill, Continuous, Service, Static, TooBusy
from labkit.serving.arrivals import Ask, Bursts, Fixed, Poisson, play, read_recorded
from labkit.serving.figures import Timing, figures, figures_of, gantt, waste
from labkit.serving.pace import Pace
from labkit.serving.paper import n_steps

pytestmark = pytest.mark.usefixtures("bookkeeping")


def served(model, scheduler, lengths, **options) -> Service:
    service = Service(model, scheduler=scheduler, start=False, **options)
    for n_prompt, n_new in lengths:
        service.submit("x" * n_prompt, max_new_tokens=n_new, ignore_eos=True)
    while service.step():
        pass
    return service


def test_every_policy_is_a_component():
    infos = {info.name: info for info in labkit.components("scheduler")}
    assert list(infos) == ["static", "continuous", "chunked-prefill"]
    assert [option.name for option in infos["chunked-prefill"].options] == [
        "max_requests", "token_budget", "order", "max_slowdown",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="unknown scheduler 'fifo': choose one of static, continuous"):
        Service(None, scheduler="fifo")


@pytest.mark.parametrize(
    ("scheduler", "widths"),
    [  # two places, answers of 1, 4, 1 and 4 tokens: by hand, the tokens of each step
        (Static(max_requests=2), [10, 1, 1, 1, 10, 1, 1, 1]),
        (Continuous(max_requests=2), [10, 1 + 5, 1 + 5, 2, 1, 1]),
        (ChunkedPrefill(max_requests=2, token_budget=16), [10, 1 + 5, 1 + 5, 2, 1, 1]),
    ],
)
def test_how_a_batch_is_filled(model, scheduler, widths):
    service = served(model, scheduler, [(5, 1), (5, 4), (5, 1), (5, 4)])
    assert [moment.n_tokens for moment in service.moments] == widths


def test_a_long_prompt_comes_in_chunks_beside_the_decodes(model):
    service = Service(model, scheduler=ChunkedPrefill(max_requests=2, token_budget=16), start=False)
    service.submit("x" * 4, max_new_tokens=8, ignore_eos=True)
    service.step()
    long = service.submit("y" * 50, max_new_tokens=2, ignore_eos=True)
    while service.step():
        pass
    assert [moment.n_tokens for moment in service.moments] == [4, 16, 16, 16, 1 + 5, 2, 1, 1]
    trace = service.handle(long).result(timeout=0).trace
    assert [(step.stage, step.n_tokens) for step in trace.steps] == [("prefill", 50), ("decode", 1)]


def test_chunks_follow_the_time_that_steps_take():
    """A machine on which n decodes take 10 ms and each token of a prompt 3 more, later 6, with a spike."""
    pace, each_s, sizes = Pace(2.0), 0.003, []
    for step in range(120):
        n = pace.tokens(4, 500)
        each_s = 0.006 if step > 60 else each_s
        seconds = 0.010 + each_s * n + (0.5 if step == 30 else 0.0)
        pace.note(4, n, seconds)
        sizes.append(n)
    assert sizes[0] == 0  # what decodes take alone is seen first, and again now and then
    assert 0 in sizes[1:]
    assert max(sizes[20:30]) == 3  # 10 + 3 x 3 ms
    assert sizes[31] == 1
    assert max(sizes[50:60]) == 3
    assert max(sizes[75:]) <= 2  # one more is tried now and then
    assert pace.tokens(0, 500) == 500  # nobody waits


def test_a_step_without_prompts_is_seen_first_and_everybody_ends(model):
    service = Service(model, scheduler=ChunkedPrefill(max_requests=2, max_slowdown=2.0), start=False)
    service.submit("x" * 4, max_new_tokens=30, ignore_eos=True)
    service.step()
    late = service.submit("y" * 40, max_new_tokens=2, ignore_eos=True)
    while service.step():
        pass
    assert [moment.n_tokens for moment in service.moments][:2] == [4, 1]
    assert late.sequence.n_new == 2
    with pytest.raises(ValueError, match="over 1"):
        ChunkedPrefill(max_slowdown=0.5)


def test_a_higher_priority_takes_the_place_of_a_lower_one(model):
    service = Service(model, scheduler=Continuous(max_requests=1), start=False)
    low = service.submit("low", max_new_tokens=9, priority=1, ignore_eos=True)
    service.step()
    high = service.submit("high", max_new_tokens=2, priority=0, ignore_eos=True)
    while service.step():
        pass
    assert high.ended_s < low.ended_s
    assert low.n_preempted == 1
    assert "recompute" in {piece.kind for piece in low.slices}
    assert len(low.sequence.token_ids) == 9


def test_a_fair_order_serves_the_user_who_got_least(model):
    service = Service(model, scheduler=Continuous(max_requests=1, order="fair"), start=False)
    asked = [(user, service.submit("xxxx", max_new_tokens=3, user=user, ignore_eos=True)) for user in "aaaab"]
    while service.step():
        pass
    order = [user for user, _ in sorted(asked, key=lambda pair: pair[1].ended_s)]
    assert order.index("b") == 1  # after one of a's, not after four


def test_what_another_has_computed_is_not_computed_again(model):
    document = "a document that two readers ask about, " * 3
    service = Service(model, kv_cache=Paged(block_size=8), start=False)
    first = service.submit(document + "one", max_new_tokens=4, ignore_eos=True)
    service.step()
    second = service.submit(document + "two", max_new_tokens=4, ignore_eos=True)
    while service.step():
        pass
    assert (first.n_shared, second.n_shared) == (0, len(document) // 8 * 8)
    assert service.handle(second).result(timeout=0).trace.steps[0].n_tokens == len(document + "two") - second.n_shared


def test_a_request_that_waited_leaves_a_trace_that_adds_up(model):
    service = served(model, Continuous(max_requests=1), [(5, 3), (5, 3)])
    for request in service.requests:
        trace = service.handle(request).result(timeout=0).trace
        assert len(trace.token_s) == 3
        assert [step.stage for step in trace.steps] == ["prefill", "decode", "decode"]
        assert sum(trace.phases.values()) <= trace.wall_s * (1 + 1e-6) + 1e-6
        assert trace.coverage > 0.5
        assert sum(trace.itl_s) + trace.ttft_s == pytest.approx(trace.token_s[-1])
    late = service.requests[1]
    assert late.slices[0].kind == "queue"
    assert service.handle(late).result(0).trace.meta["queue_s"] == pytest.approx(late.started_s - late.arrived_s)


def test_log_probabilities_are_those_of_the_model(model):
    service = Service(model, start=False)
    request = service.submit("Hello", max_new_tokens=3, n_logprobs=2, ignore_eos=True)
    while service.step():
        pass
    rest = math.log(math.e + 299)
    for token_id, (own, tops) in zip(request.sequence.token_ids, request.sequence.logprobs, strict=True):
        assert own == pytest.approx(1 - rest, abs=1e-5)  # the logits are a one and 299 zeros
        assert len(tops) == 2
        assert tops[token_id] == own
        assert sorted(tops.values())[0] == pytest.approx(-rest, abs=1e-5)


def test_what_is_refused(model):
    service = Service(model, max_waiting=2, capacity_tokens=30, start=False)
    with pytest.raises(ValueError, match="the prompt has 40 tokens and this server has room for 30 of one request"):
        service.submit("x" * 40)
    with pytest.raises(ValueError, match="the prompt is empty"):
        service.submit("")
    with pytest.raises(ValueError, match=r"token id 300 is outside the vocabulary \(0 to 299\)"):
        service.submit([1, 300])
    assert service.submit("x" * 20, max_new_tokens=50).sequence.max_new_tokens == 11
    service.submit("one more")
    with pytest.raises(TooBusy, match="2 requests are waiting") as refusal:
        service.submit("one too many")
    assert refusal.value.retry_after_s >= 1


def test_what_breaks_reaches_the_reader_and_the_next_is_served(model, monkeypatch):
    service = Service(model)
    with monkeypatch.context() as patch:
        patch.setattr(service.engine, "step", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            service.generate("Hello")
    assert len(service.generate("Hello", max_new_tokens=3, ignore_eos=True).token_ids) == 3
    run = service.run("Hello", max_new_tokens=150, ignore_eos=True)
    next(iter(run))
    run.stop()
    assert run.result(30).finish_reason == "cancelled"
    service.close()
    with pytest.raises(RuntimeError, match="closed"):
        service.submit("Hello")
    assert service.engine.cache.allocator.n_used == 0


@pytest.mark.parametrize("scheduler", [Static(max_requests=3), Continuous(max_requests=3)])
def test_the_count_on_paper_is_what_the_service_takes(model, scheduler):
    answers = [9, 2, 2, 5, 1, 7, 3]
    service = served(model, scheduler, [(1, n) for n in answers])
    assert n_steps(scheduler, answers) == len(service.moments)


# --- arrivals


def test_when_they_come():
    asks = [{"prompt": str(n)} for n in range(2000)]
    assert [ask.at_s for ask in Bursts(2, 3.0).over(asks)][:5] == [0, 0, 3, 3, 6]
    at = [ask.at_s for ask in Poisson(per_s=4.0, seed=1).over(asks)]
    gaps = [b - a for a, b in pairwise(at)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.15)  # of an exponential, both are the same
    with pytest.raises(ValueError, match="must be above 0"):
        Fixed(per_s=0).over(asks)


def test_a_recorded_trace(tmp_path):
    (tmp_path / "t.csv").write_text("at_s,n_prompt_tokens,max_new_tokens,user\n0.5,3,7,b\n0,2,,\n")
    (tmp_path / "t.json").write_text(json.dumps([{"at_s": 0, "prompt": "hi", "priority": 2}]))
    assert read_recorded(tmp_path / "t.csv") == [
        Ask(0.0, {"prompt": [1, 1]}),
        Ask(0.5, {"prompt": [1, 1, 1], "max_new_tokens": 7, "user": "b"}),
    ]
    assert read_recorded(tmp_path / "t.json") == [Ask(0.0, {"prompt": "hi", "priority": 2})]
    (tmp_path / "bad.csv").write_text("at_s,max_new_tokens\n0,2\n")
    with pytest.raises(ValueError, match=r"bad\.csv, row 1: at_s and prompt or n_prompt_tokens are needed"):
        read_recorded(tmp_path / "bad.csv")


def test_requests_are_played_and_refusals_kept():
    def submit(prompt):
        if prompt == "b":
            raise TooBusy(3, 1.0)
        return prompt

    got = play([Ask(0.0, {"prompt": p}) for p in "abc"], submit)
    assert (got[0], type(got[1]), got[2]) == ("a", TooBusy, "c")
    stop = threading.Event()
    stop.set()
    assert play([Ask(0.0, {"prompt": "a"})], submit, stop) == []


# --- figures


def test_figures_against_numpy():
    chance = np.random.default_rng(0)
    timings = [
        Timing(0.1, ttft, tuple(itl), ttft + sum(itl), 5, 1 + len(itl))
        for ttft, itl in ((chance.uniform(0.1, 1), chance.uniform(0.01, 0.1, 9)) for _ in range(50))
    ]
    done = figures(timings, 20.0, ttft_limit_s=0.5, itl_limit_s=0.098)
    assert done.ttft_s["p95"] == pytest.approx(np.quantile([t.ttft_s for t in timings], 0.95))
    assert done.itl_s["p99"] == pytest.approx(np.quantile([g for t in timings for g in t.itl_s], 0.99))
    assert done.tpot_s["p50"] == pytest.approx(np.median([np.mean(t.itl_s) for t in timings]))
    assert done.tpot_with_ttft_s["p50"] == pytest.approx(np.median([t.e2e_s / 10 for t in timings]))
    good = [t for t in timings if t.ttft_s <= 0.5 and np.quantile(t.itl_s, 0.99) <= 0.098]
    assert 0 < len(good) < 50
    assert done.goodput_per_s == pytest.approx(len(good) / 20)
    assert done.tokens_per_s == pytest.approx(25)
    assert figures([], 0.0).ttft_s == {}


def test_a_gantt_covers_each_request(model):
    service = served(model, Static(max_requests=2), [(5, 1), (5, 4), (5, 2)])
    rows = gantt(list(service.requests))
    assert {row["request"] for row in rows} == {1, 2, 3}
    for request in service.requests:
        mine = [row for row in rows if row["request"] == request.request_id]
        assert sum(row["n_tokens"] for row in mine) == 5 + len(request.sequence.token_ids) - 1
        assert all(row["start_s"] <= row["end_s"] for row in mine)
    assert figures_of(list(service.requests)).n_tokens == 7


def test_waste_is_what_the_last_blocks_do_not_hold(model):
    service = served(model, Continuous(max_requests=1), [(12, 2)], kv_cache=Paged(block_size=8))
    assert waste(list(service.moments)[:1]) == pytest.approx(1 - 12 / 16)
    reserved = served(model, Continuous(max_requests=1), [(12, 2)], kv_cache="contiguous", capacity_tokens=120)
    assert waste(list(reserved.moments)[:1]) == pytest.approx(1 - 12 / 120)
    assert waste([]) is None
