"""The timer on a clock that the test turns, and the trace that comes of it."""

from __future__ import annotations

import json

import pytest

from labkit.perf import timer as timing
from labkit.perf.timer import NULL_TIMER, PHASES, StepRecord, Timer
from labkit.perf.trace import Trace, quantile


class Clock:
    """Time passes only when the test says so."""

    def __init__(self) -> None:
        self.now_ns = 5_000_000_000

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def wait(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


def recorded(clock: Clock) -> Timer:
    """A prefill with a phase inside a phase, and two decode steps."""
    timer = Timer(detail_every=2)
    timer.begin()
    timer.begin_step("prefill", n_tokens=7)
    with timer("embed"):
        clock.wait(1)
    timer.layer = 0
    with timer("attention"):
        clock.wait(2)
        with timer("kv_cache"):
            clock.wait(3)
        clock.wait(4)
    timer.layer = -1
    clock.wait(0.5)  # belongs to no phase
    for _ in range(2):
        timer.begin_step("decode", n_tokens=1)
        with timer("ffn"):
            clock.wait(2)
        with timer("sample"):
            clock.wait(1)
    timer.end_step()
    return timer


def test_phases_are_exclusive_and_add_up(clock):
    timer = recorded(clock)
    prefill, *decode = timer.steps
    assert prefill.phases == pytest.approx({"embed": 1, "attention": 6, "kv_cache": 3})
    assert [step.phases for step in decode] == [pytest.approx({"ffn": 2, "sample": 1})] * 2
    assert [step.stage for step in timer.steps] == ["prefill", "decode", "decode"]
    assert [(step.start_s, step.end_s) for step in timer.steps] == [(0, 10.5), (10.5, 13.5), (13.5, 16.5)]


def test_detail_keeps_every_switch_of_the_sampled_steps(clock):
    prefill, first, second = recorded(clock).steps
    assert prefill.detail == [
        ("embed", -1, 0, 1),
        ("attention", 0, 1, 3),
        ("kv_cache", 0, 3, 6),
        ("attention", 0, 6, 10),
    ]
    assert first.detail == []
    assert [name for name, *_ in second.detail] == ["ffn", "sample"]


def test_a_fused_kernel_may_say_where_its_time_went(clock):
    timer = Timer()
    timer.begin_step("decode")
    with timer("attention"):
        clock.wait(10)
        timer.charge({"ffn": 6.0, "norm": 1.0})
    timer.end_step()
    assert timer.steps[0].phases == pytest.approx({"attention": 3, "ffn": 6, "norm": 1})


def test_an_exception_closes_its_phase(clock):
    timer = Timer()
    timer.begin_step("prefill")
    with pytest.raises(RuntimeError), timer("ffn"):  # noqa: PT012
        clock.wait(1)
        raise RuntimeError
    with timer("norm"):
        clock.wait(2)
    timer.end_step()
    assert timer.steps[0].phases == pytest.approx({"ffn": 1, "norm": 2})


def test_an_open_step_can_be_read(clock):
    timer = Timer()
    timer.begin_step("prefill", n_tokens=3)
    with timer("ffn"):
        clock.wait(1)
    clock.wait(4)
    (live,) = timer.records()
    assert (live.phases, live.end_s, live.n_tokens) == (pytest.approx({"ffn": 1}), 5, 3)
    assert timer.steps[0].end_s == 0  # reading it did not close it


def test_unknown_phases_are_refused():
    with pytest.raises(ValueError, match=r"unknown phase 'atention': choose one of tokenize, embed, attention"):
        Timer()("atention")


def test_the_null_timer_keeps_nothing():
    with NULL_TIMER("no such phase, and nobody looks"):
        NULL_TIMER.charge({"ffn": 1.0})
    assert not NULL_TIMER.enabled


@pytest.fixture
def trace(clock) -> Trace:
    timer = recorded(clock)
    return Trace(tuple(timer.steps), (10.5, 13.5, 16.5), 16.5, 7, {"model": "tiny"})


def test_a_trace_answers_in_seconds(trace):
    assert trace.ttft_s == 10.5
    assert trace.itl_s == [3, 3]
    assert trace.phases == pytest.approx({"embed": 1, "attention": 6, "ffn": 4, "sample": 2, "kv_cache": 3})
    assert list(trace.phases) == [name for name in PHASES if name in trace.phases]
    assert trace.stage_phases("decode") == pytest.approx({"ffn": 4, "sample": 2})
    assert (trace.stage_s("prefill"), trace.stage_s("decode")) == (10.5, 6)
    assert trace.coverage == pytest.approx(16 / 16.5)
    summary = trace.summary()
    assert summary["itl_median_ms"] == 3000
    assert summary["decode_tok_s"] == pytest.approx(1 / 3)
    assert summary["prefill_tok_s"] == pytest.approx(7 / 10.5)
    assert (summary["n_prompt_tokens"], summary["n_tokens"]) == (7, 3)


def test_spans_cover_what_the_phases_count(trace):
    totals: dict[str, float] = {}
    for span in trace.spans:
        totals[span.name] = totals.get(span.name, 0.0) + span.duration_s
    assert totals == pytest.approx(trace.phases)
    assert {span.layer for span in trace.spans} == {None, 0}
    assert [s.start_s for s in trace.spans] == sorted(s.start_s for s in trace.spans)


def test_dataframe_has_a_row_a_span(trace):
    frame = trace.to_dataframe()
    assert list(frame.columns) == ["step_idx", "stage", "phase", "layer", "start_ms", "duration_ms"]
    assert len(frame) == len(trace.spans)
    by_phase = frame.groupby("phase")["duration_ms"].sum().to_dict()
    assert by_phase == pytest.approx({name: s * 1e3 for name, s in trace.phases.items()})


def test_json_there_and_back(trace):
    assert Trace.from_json(trace.to_json()) == trace


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other"}', "null", "not json"])
def test_what_is_no_trace_is_refused(text):
    with pytest.raises(ValueError, match=r"not a labkit trace|unknown trace format"):
        Trace.from_json(text)


def test_chrome_events_lie_inside_the_run(trace, tmp_path):
    path = trace.to_chrome(tmp_path / "run.json")
    written = json.loads(path.read_text())
    events = [event for event in written["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(trace.steps) + len(trace.spans)
    assert all(e["ts"] >= 0 and e["ts"] + e["dur"] <= trace.wall_s * 1e6 + 1 for e in events)
    steps = [e for e in events if e["tid"] == 1]
    assert [e["name"] for e in steps] == ["prefill 0", "decode 1", "decode 2"]
    assert steps[0]["args"] == {"n_tokens": 7}
    inner = next(e for e in events if e["name"] == "kv_cache")
    assert inner["args"] == {"stage": "prefill", "step": 0, "layer": 0}
    assert written["otherData"] == {"model": "tiny"}


def test_an_empty_run_has_no_numbers_and_no_errors(tmp_path):
    empty = Trace((), (), 0.0)
    assert (empty.ttft_s, empty.itl_s, empty.phases, empty.coverage, empty.spans) == (None, [], {}, 0.0, [])
    assert empty.summary()["decode_tok_s"] is None
    assert len(empty.to_dataframe()) == 0
    assert Trace.from_json(empty.to_json()) == empty
    one = Trace((StepRecord("prefill", 0.0, 1.0),), (1.0,), 1.0)
    assert one.summary()["itl_median_ms"] is None
    assert empty.to_chrome(tmp_path / "empty.json").exists()


@pytest.mark.parametrize("q", [0.0, 0.25, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("values", [[3.0], [2.0, 1.0], [5.0, 1.0, 4.0, 2.0, 8.0]])
def test_quantiles_equal_numpys(values, q):
    numpy = pytest.importorskip("numpy")
    assert quantile(values, q) == pytest.approx(float(numpy.quantile(values, q)))


def test_a_scope_keeps_what_is_spent_inside(clock):
    timer = Timer(detail_every=0)
    timer.begin()
    timer.begin_step("decode")
    with timer.only("verify"):
        clock.wait(1)
        with timer("attention"):
            clock.wait(2)
            with timer.only("draft"):
                clock.wait(4)
        timer.charge({"ffn": 0.5})
    with timer("attention"):
        clock.wait(8)
    timer.end_step()
    assert timer.steps[0].phases == pytest.approx({"verify": 7.0, "attention": 8.0})


def test_a_scope_ends_with_an_error(clock):
    timer = Timer()
    timer.begin_step("decode")
    with pytest.raises(KeyError), timer.only("draft"):
        raise KeyError
    with timer("ffn"):
        clock.wait(1)
    timer.end_step()
    assert timer.steps[0].phases["ffn"] == pytest.approx(1.0)


def test_tokens_that_come_together():
    trace = Trace((), (1.0, 3.0, 3.0, 3.0, 4.0, 6.0, 6.0), 6.0)
    assert trace.itl_s == [2.0, 0.0, 0.0, 1.0, 2.0, 0.0]
    assert trace.round_s == [2.0, 1.0, 2.0]
    assert trace.paced_s == pytest.approx([2 / 3, 2 / 3, 2 / 3, 1.0, 1.0, 1.0])
    figures = trace.summary()
    assert figures["tokens_per_round"] == 2.0
    assert figures["round_median_ms"] == 2000.0
    assert figures["itl_median_ms"] == pytest.approx(2500 / 3)
    assert figures["decode_tok_s"] == pytest.approx(6 / 5)
