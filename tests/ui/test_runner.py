"""Background work: returns at once, stops, reports, fails loudly; and the foreground mode that Colab needs."""

from __future__ import annotations

import threading

import pytest

from labkit.ui.errors import ErrorBox, error_html, guarded
from labkit.ui.runner import Job, Runner


def test_start_returns_while_the_work_goes_on():
    gate, runner = threading.Event(), Runner()
    assert runner.start(lambda job: gate.wait(30))
    assert runner.running
    assert not runner.start(lambda job: None), "one piece of work at a time"
    gate.set()
    assert runner.wait(30) is True
    assert not runner.running


def test_stop_ends_the_work_where_it_checks():
    runner, begun = Runner(), threading.Event()

    def work(job: Job) -> None:
        begun.set()
        while True:
            job.stop_event.wait(0.01)
            job.check()

    runner.start(work)
    assert begun.wait(30)
    runner.stop()
    assert runner.wait(30) is None
    assert runner.job is not None
    assert runner.job.stopped


def test_ticks_publish_the_latest_state_and_the_end_comes_once():
    ticks, ends, gate = [], [], threading.Event()

    def tick(job: Job) -> None:
        ticks.append(job.fraction)
        gate.set()

    runner = Runner(on_tick=tick, on_end=lambda job: ends.append(job.result))
    runner.start(lambda job: (job.progress(0.5, "half"), gate.wait(30), "made")[-1])
    assert runner.wait(30) == "made"
    assert set(ticks) == {0.5}
    assert ends == ["made"]


@pytest.mark.parametrize("foreground", [False, True])
def test_a_failing_work_is_raised_by_wait(monkeypatch, foreground):
    if foreground:
        monkeypatch.setenv("LABKIT_FOREGROUND", "1")
    runner = Runner()
    runner.start(lambda job: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.wait(30)
    runner.start(lambda job: "fine")
    assert runner.wait(30) == "fine"


def test_a_failing_tick_stops_the_work_and_is_raised():
    def tick(job: Job) -> None:
        raise KeyError("lost")

    runner = Runner(on_tick=tick)
    runner.start(lambda job: job.stop_event.wait(30))
    with pytest.raises(KeyError, match="lost"):
        runner.wait(30)


def test_the_foreground_runs_before_start_returns(monkeypatch):
    monkeypatch.setenv("COLAB_NOTEBOOK_ID", "x")
    seen = []
    runner = Runner(on_tick=lambda job: seen.append(job.message), on_end=lambda job: seen.append("end"))
    runner.start(lambda job: job.progress(0.1, "here"))
    assert seen == ["here", "end"]


def test_an_interrupt_in_the_foreground_stops_and_the_next_run_works(monkeypatch):
    monkeypatch.setenv("LABKIT_FOREGROUND", "1")
    runner = Runner()

    def interrupted(job: Job) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.start(interrupted)
    assert runner.start(lambda job: "again")
    assert runner.wait(30) == "again"


def test_a_guarded_callback_shows_its_failure_and_raises_under_test(monkeypatch):
    box = ErrorBox()

    def bad() -> None:
        raise ValueError("<b>so</b> wrong")

    with pytest.raises(ValueError, match="so"):
        guarded(box, bad)()
    assert "&lt;b&gt;so" in box.value
    monkeypatch.setenv("LABKIT_TEST", "0")
    assert guarded(box, bad)() is None


def test_an_error_is_told_kindly():
    shown = error_html(FileNotFoundError("the notebook x is not here: clone the repository."))
    assert 'role="alert"' in shown
    assert "Something is missing" in shown
    assert shown.index("clone the repository") < shown.index("<details>"), "the traceback comes last, folded"
