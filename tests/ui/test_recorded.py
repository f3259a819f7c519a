"""Recorded runs: real ones, labelled with machine and date, shown until the reader's own takes their place."""

from __future__ import annotations

import importlib.util
import json
from datetime import date
from pathlib import Path

import pytest

from labkit.perf.machine import BUSY_SHARE
from labkit.resources import data_path
from labkit.ui import recorded, words
from labkit.ui.experiment import Experiment, Result
from labkit.ui.panels import batching, cache_toggle, race, roofline
from labkit.ui.panels.switchboard import Switchboard
from labkit.ui.predict import predict
from labkit.ui.run_tiles import tiles

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.stem for path in data_path("recorded").glob("*.json"))
DRAWN = {
    "batching": batching.served_result,
    "cache-toggle": cache_toggle.draw_recorded,
    "race": race.race_result,
    "roofline": roofline.draw_recorded,
    "roofline-plain": roofline.draw_recorded,
}
BOARDS = ["switchboard-first", "switchboard-story"]


@pytest.fixture(autouse=True)
def _back_to_english():
    yield
    words.choose(None)


def script():
    spec = importlib.util.spec_from_file_location("record", ROOT / "benchmarks" / "recorded.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_recording_has_a_command_that_makes_it_and_a_page_that_shows_it():
    assert sorted(script().RECORDED) == NAMES == sorted([*DRAWN, *BOARDS])


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_says_where_and_when(name):
    found = recorded.recording(name)
    assert date.fromisoformat(found.date)
    assert found.n_cores >= 1
    assert 0 <= found.busy_share <= 1
    said = found.words()
    assert all(text in said for text in (found.processor, found.date, "not a run on this machine"))
    assert ("take the times as rough" in said) == (found.busy_share > BUSY_SHARE)
    words.choose("zh-CN")
    assert found.processor in found.words() != said


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("language", ["en", "zh-CN"])
def test_a_recording_is_drawn_by_its_panel(name, language):
    words.choose(language)
    result = DRAWN[name](recorded.recording(name).data)
    assert isinstance(result, Result)
    assert len(result.rows)
    assert result.summary
    assert result.figure is not None or "lk-lane" in result.extra
    page = f"{result.figure and result.figure.to_json()} {result.caption} {result.summary}"
    assert not [claim for claim in ("measured here", "just now", "faster here") if claim in page]


@pytest.mark.parametrize("name", BOARDS)
def test_a_recorded_answer_has_phases_that_fill_its_time(name):
    data = recorded.recording(name).data
    run = recorded.completion_of(data["run"])
    assert data["prompt"]
    assert run.text
    assert run.trace.n_tokens == len(run.token_ids)
    assert 0.5 < run.trace.coverage <= 1
    assert all(tile["value"] != "–" for tile in tiles(run.trace))


def test_a_run_goes_to_json_and_back(tmp_path, default_model):
    import labkit

    run = labkit.Pipeline(default_model).generate("Once", max_new_tokens=4)
    path = recorded.keep(tmp_path, "x", {"run": recorded.completion_data(run)}, busy_share=0.2)
    again = recorded.completion_of(json.loads(path.read_text(encoding="utf-8"))["data"]["run"])
    assert (again.text, again.token_ids) == (run.text, run.token_ids)
    assert again.trace.phases == pytest.approx(run.trace.phases, abs=1e-5)


def panel(guess=None) -> Experiment:
    def run(job, **values):
        return Result(None, [{"a": 1}], "my own run")

    return Experiment("Which?", run, guess=guess, recorded=("race", race.race_result))


def test_a_recording_stands_there_until_the_readers_own_run():
    shown = panel()
    assert "Recorded" in shown.origin.value
    assert "recorded" in shown.head.value
    assert "lk-lane" in shown.below.value
    assert shown.results == []
    shown.run_button.click()
    assert shown.wait(20).summary == "my own run"
    assert shown.origin.value == ""
    assert "measured here" in shown.head.value
    assert "lk-lane" not in shown.below.value
    shown.reset_button.click()
    assert "Recorded" in shown.origin.value
    assert "lk-lane" in shown.below.value


def test_a_recording_reveals_nothing_before_the_guess(monkeypatch):
    monkeypatch.setenv("LABKIT_TEST", "0")
    guess = predict("Which one?", choices=["A", "B"])
    shown = panel(guess)
    assert "lk-lane" not in shown.below.value
    assert shown.origin.value == ""
    guess.skip_button.click()
    assert "lk-lane" in shown.below.value
    assert "Recorded" in shown.origin.value


def test_the_switchboard_begins_with_a_recorded_run():
    board = Switchboard(prompt="story", max_new_tokens=2, preload=False)
    assert "Recorded" in board.origin.value
    data = recorded.recording("switchboard-story").data
    assert board.bars.state["text"] == data["run"]["text"]
    assert board.completion is None
    assert board.history.records == []
    other = Switchboard(prompt="numbers", preload=False)
    assert other.origin.value == ""
    assert not other.bars.state.get("text")


def test_a_file_that_is_no_recording_is_refused(monkeypatch, tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    monkeypatch.setattr(recorded, "data_path", lambda *parts: path)
    with pytest.raises(ValueError, match="is not a recording"):
        recorded.recording("x")
