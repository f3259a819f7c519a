"""The figure of a lesson's run, as the anatomy has it: median, range, ceiling, and the reader's guess; and the settings
that should turn a result round, whose sentence never says other than the numbers."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from labkit.perf.probe import engine_of
from labkit.ui.compare import Comparison
from labkit.ui.experiment import Result, with_guess
from labkit.ui.panels import attention, cache_toggle, reversals, roofline, sampling, token_bill
from labkit.ui.spread import CEILING
from tests.ui.test_model_panels import Job, Lab

WORDS = "prompt of some words"
PLAIN = {"backend": "reference"}


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab()


@pytest.fixture(autouse=True)
def plain_pytorch(monkeypatch, known_machine):
    """Nothing compiles here."""
    for module in (reversals, roofline):
        monkeypatch.setattr(module, "engine_here", lambda model, **how: engine_of(model, **PLAIN | how))


RUNS = {
    "01": lambda lab, job: token_bill.token_bill(job, vocabulary="bytes only, 256 tokens", unit="tokens"),
    "03": lambda lab, job: attention.measure_crossing(lab, job, longest=512, n_repeats=3),
    "03, turned": lambda lab, job: reversals.window(lab, job, n_kept=64, longest=512),
    "05": lambda lab, job: sampling.measure_climb(lab, job, prompt=WORDS, n_tokens=12),
    "06": lambda lab, job: cache_toggle.measure_toggle(
        lab, job, SimpleNamespace(run_handle=None), prompt=WORDS, n_tokens=64, switch_at=4
    ),
    "06, turned": lambda lab, job: reversals.short_answer(lab, job, prompt=WORDS, n_tokens=2),
    "07": lambda lab, job: roofline.measure(lab, job, grows=roofline.BATCH, up_to=4),
    "07, turned": lambda lab, job: reversals.long_context(lab, job, n_together=2, n_past=256),
    "08, turned": lambda lab, job: reversals.smaller(lab, job, n_past=160, backend="reference"),
}


def has_range(figure) -> bool:
    """Whether a trace has error bars from lowest to highest, and not of no length: turns that were taken differ."""
    bars = [axis for trace in figure.data for axis in (trace.error_x, trace.error_y) if axis and axis.array]
    return any(bar.arrayminus and max(bar.array) > 0 and max(bar.arrayminus) > 0 for bar in bars)


def ceilings(figure) -> list[str]:
    return [trace.name for trace in figure.data if trace.name and CEILING in trace.name]


@pytest.mark.parametrize("run", RUNS)
def test_a_figure_has_its_range_and_its_ceiling(lab, run):
    job = Job()
    result: Result = RUNS[run](lab, job)
    assert has_range(result.figure), "median without range"
    assert ceilings(result.figure), "no ceiling"
    assert result.summary
    assert len(result.rows)
    if "turned" not in run:
        marked = with_guess(result, SimpleNamespace(guess=2.0, text="2"))
        assert "your guess" in str(marked.layout), "the guess is not in the figure"


def test_a_step_is_compared_with_its_like_only():
    """A switch that came a token later in the second run: the step that filled the cache has no partner there."""

    def trace(switch: int, itl_s: list[float]) -> SimpleNamespace:
        used = [{"from_token": 0, "name": "none"}, {"from_token": switch, "name": "contiguous"}]
        return SimpleNamespace(meta={"kv_caches": used}, itl_s=itl_s, n_tokens=5)

    turns = cache_toggle.repeats_of([trace(2, [0.1, 0.2, 0.3, 0.4]), trace(3, [0.5, 0.6, 0.7, 0.8])])
    assert turns == [[pytest.approx(100), pytest.approx(500)], [pytest.approx(200)], [pytest.approx(300)], [400, 800]]


def test_a_window_that_turns_nothing_is_said():
    def data(whole, kept):
        ends = {"share": [20.0, 60.0], "crossing": whole}, {"share": [20.0, 30.0], "crossing": kept}
        return {"whole": ends[0], "window": ends[1], "lengths": [128, 2048], "n_kept": 64, "busy": False}

    assert "Turned round" in reversals.said_of_window(data(900.0, None))
    assert "Not turned round" in reversals.said_of_window(data(900.0, 1000.0))
    assert "Nothing to turn round" in reversals.said_of_window(data(None, None))


@pytest.mark.parametrize(("none", "cached", "turned"), [(10.0, 10.1, True), (10.0, 12.0, True), (30.0, 10.0, False)])
def test_an_answer_too_short_is_one_that_gains_nothing(none, cached, turned):
    found = Comparison({"no cache": [none] * 3, "KV cache": [cached] * 3})
    words = reversals.said_of_short({"comparison": found, "n_tokens": 1, "bytes": 1e6})
    assert words.startswith("**Turned round**") == turned
    assert ("1.0 MB" in words) == turned


@pytest.mark.parametrize(
    ("far", "start"), [((1.0, 0.9, 1.04), "**Turned"), ((1.8, 1.7, 1.9), "**Partly"), ((3.0, 2.9, 3.1), "**Not")]
)
def test_a_batch_at_a_long_context(far, start):
    data = {"gains": {64: (3.0, 2.9, 3.2), 1024: far}, "n_together": 4, "n_past": 1024, "busy": True}
    words = reversals.said_of_context(data)
    assert words.startswith(start)
    assert "busy" in words


def test_smaller_is_slower_faster_or_neither():
    turns = {"contiguous": [10.0, 10.0, 10.0], "int8": [8.0, 8.1, 8.0], "int4": [9.0, 11.0, 10.0]}
    int8, int4 = re.split(r" (?=\*\*int4)", reversals.said_of_smaller({"turns": turns, "busy": False}))
    assert "faster" in int8
    assert "no slower and no faster" in int4
    turns["int4"] = [30.0, 31.0, 30.0]
    assert "**slower**: 3.00 times" in reversals.said_of_smaller({"turns": turns, "busy": False})
