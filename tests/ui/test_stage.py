"""The stage: three controls; slow motion is the run's own times, slower, and says so."""

from __future__ import annotations

import threading

import pytest

import labkit
from labkit.ui.panels import stage
from labkit.ui.session import shelf
from tests.ui.test_model_panels import Job


class Watched(Job):
    """Remembers each fraction, too."""

    def __init__(self) -> None:
        super().__init__()
        self.fractions = []

    def progress(self, fraction, message=""):
        self.fractions.append(fraction)


@pytest.fixture(scope="module")
def done(default_model):
    return labkit.Pipeline(default_model).generate("Once", max_new_tokens=6, ignore_eos=True)


def test_it_has_three_controls_and_begins_with_a_recorded_run():
    board = stage.panel()
    assert len(board.fields) == 3
    assert "Recorded" in board.origin.value
    assert board.bars.state["text"]
    assert board.bars in board.widget.children


def test_a_trace_cut_at_a_moment_holds_what_was_over_by_then(done):
    trace = done.trace
    assert stage.until(trace, trace.wall_s).phases == pytest.approx(trace.phases)
    assert stage.until(trace, 0.0).token_s == ()
    before = 0.0
    for share in (0.1, 0.3, 0.5, 0.9):
        cut = stage.until(trace, share * trace.wall_s)
        assert cut.token_s == tuple(at for at in trace.token_s if at <= share * trace.wall_s)
        assert before <= sum(cut.phases.values()) <= cut.wall_s * (1 + 1e-9)
        before = sum(cut.phases.values())


def test_slow_motion_ends_where_the_run_ended_and_says_what_it_was(done, default_model):
    job = Watched()
    stage.replay(job, default_model.tokenizer, done, "Once\n", 2.0)
    scenes = [result.data for result in job.shown]
    assert scenes[-1].text == done.text
    assert scenes[-1].trace.n_tokens == done.trace.n_tokens
    assert [len(scene.text) for scene in scenes] == sorted(len(scene.text) for scene in scenes)
    assert job.fractions[-1] == pytest.approx(1.0)
    assert "replay" in stage.ended(done, "Once\n", 0.5).summary
    assert "replay" not in stage.ended(done, "Once\n").summary


def test_a_run_on_the_stage_is_the_pipelines(default_model):
    shelf.put(default_model)
    try:
        board = stage.panel()
        board.fields["question"].value = "Name a colour."
        board.run_button.click()
        scene = board.wait(120).data
        want = labkit.Pipeline(default_model).generate("Name a colour.", max_new_tokens=64, chat=True)
        assert scene.text == want.text == board.bars.state["text"]
        assert board.origin.value == ""
        board.fields["question"].value = " "
        board.run_button.click()
        with pytest.raises(ValueError, match="no question"):
            board.wait(30)
    finally:
        shelf.clear()


def test_stop_does_not_wait_for_the_model(monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(labkit, "load", lambda *args, **options: go_on.wait(60))
    shelf.clear()
    try:
        board = stage.panel()
        board.run_button.click()
        board.stop_button.click()
        assert board.wait(10) is None
        assert not go_on.is_set()
    finally:
        go_on.set()
        with shelf._lock:  # the load that was left behind has ended
            pass
        shelf.clear()
