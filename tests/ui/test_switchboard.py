"""The switchboard without a browser: simulated clicks against the pipeline itself."""

from __future__ import annotations

import pytest
import traitlets

import labkit
from labkit import registry
from labkit.ui.component_picker import ComponentPicker
from labkit.ui.panels.switchboard import Switchboard
from labkit.ui.session import shelf

N_NEW = 5


@pytest.fixture
def board(default_model):
    shelf.put(default_model)
    board = Switchboard(prompt="one_word", max_new_tokens=N_NEW)
    yield board
    board.stop()
    board.runner.wait(60) if board.runner.running else None


@pytest.fixture(scope="module", autouse=True)
def _leave_the_shelf_empty():
    yield
    shelf.clear()


def run(board: Switchboard):
    board.run_button.click()
    return board.wait(120)


def test_a_run_is_the_pipelines_run(board, default_model):
    completion = run(board)
    expected = labkit.Pipeline(default_model).generate("Once", max_new_tokens=N_NEW)
    assert completion.token_ids == expected.token_ids
    assert board.bars.state["text"] == expected.text
    assert [row["name"] for row in board.bars.state["stages"]] == ["Prefill", "Decode"]
    for row in board.bars.state["stages"]:
        assert sum(segment["share"] for segment in row["segments"]) == pytest.approx(1)
    memory = next(tile for tile in board.bars.state["tiles"] if tile["label"] == "Memory")
    assert memory["note"].startswith(f"{default_model.nbytes / 1e6:.0f} MB weights")


def test_runs_stand_side_by_side_and_differences_are_named(board):
    first = run(board)
    board.switches.pickers["kv_cache"].field.value = "none"
    second = run(board)
    assert first.token_ids == second.token_ids
    assert board.history.differing == ["KV cache"]
    page = board.runs.value
    assert "What differs: KV cache" in page
    assert "same as A" in page


@pytest.mark.parametrize(("prompt", "message"), [("", "the prompt is empty"), ("word " * 9000, "context holds 8192")])
def test_a_bad_prompt_is_told_and_kept(board, prompt, message):
    board.switches.prompt.value = prompt
    board.run_button.click()
    with pytest.raises(ValueError, match=message):
        board.wait(120)
    assert message in board.error.value
    assert board.switches.prompt.value == prompt
    assert board.status.state == "error"
    board.switches.prompt.value = "Once"
    assert run(board).finish_reason in ("stop", "length")
    assert board.error.value == ""


def test_own_words_are_marked_as_such(board):
    board.switches.prompt.value = "My <b>own</b>"
    assert board.switches.ready.value == ""
    assert "My <b>own</b>" in board.switches.read().words["prompt"]
    board.switches.ready.value = "story"
    assert board.switches.prompt.value.startswith("The lighthouse keeper")
    assert board.switches.chat.value is False


def test_stop_keeps_what_was_written(board):
    board.switches.length.value = 400
    board.run_button.click()
    while not (board._run and board._run.text):
        board.stop_button.description  # noqa: B018 - the run works in its own thread
    board.stop_button.click()
    completion = board.wait(60)
    assert completion.finish_reason == "cancelled"
    assert completion.text
    assert board.status.state == "stopped"
    board.switches.length.value = N_NEW
    assert run(board).finish_reason in ("stop", "length")


def test_reset_puts_everything_back(board):
    before = board.switches.read()
    run(board)
    board.switches.pickers["sampling"].field.value = "top-k"
    board.switches.length.value = 99
    board.reset_button.click()
    assert board.switches.read() == before
    assert board.history.records == []
    assert board.runs.value == ""


def test_two_boards_share_the_model_and_nothing_else(board):
    other = Switchboard(prompt="numbers", max_new_tokens=N_NEW)
    board.run_button.click()
    other.run_button.click()
    a, b = board.wait(120), other.wait(120)
    assert a.token_ids != b.token_ids
    assert len(board.history.records) == len(other.history.records) == 1
    for each, completion in ((board, a), (other, b)):
        model = each.loader.get(each.switches.load_options, each.runner.job)
        again = labkit.Pipeline(model).generate(each.switches.prompt.value, max_new_tokens=N_NEW)
        assert again.token_ids == completion.token_ids


def test_every_registered_component_is_offered_or_explained(board):
    kinds = {"kv_cache": "kv_cache", "backend": "backend", "sampling": "sampler"}
    for key, kind in kinds.items():
        picker = board.switches.pickers[key]
        offered = {value for _, value in picker.field.control.options}
        for info in registry.components(kind):
            assert (info.name in offered) == (info.unavailable is None)
            if info.unavailable is not None:
                assert info.name in picker.note.value


@pytest.mark.parametrize("info", registry.components("sampler"), ids=lambda info: info.name)
def test_options_become_controls_and_a_config(info):
    picker = ComponentPicker("sampler", "Sampler", value=info.name)
    assert set(picker._options) == {option.name for option in info.options}
    component, config = registry.find("sampler", picker.value)
    assert component.name == info.name
    for option in info.options:
        assert getattr(config, option.name) == option.default


def test_no_component_is_a_choice_that_shows():
    picker = ComponentPicker("weights", "Weights", none_label="as stored")
    assert (picker.field.control.label, picker.value) == ("as stored", None)
    picker.field.value = registry.components("weights")[0].name
    picker.reset()
    assert (picker.field.control.label, picker.value) == ("as stored", None)


def test_a_changed_option_reaches_the_run_and_the_words(board):
    picker = board.switches.pickers["sampling"]
    picker.field.value = "top-k"
    picker._options["top_k"].value = 1
    settings = board.switches.read()
    assert settings.pipeline["sampling"].top_k == 1
    assert settings.words["sampler"] == "top-k, top_k=1"
    greedy = labkit.Pipeline(shelf.get()).generate("Once", max_new_tokens=N_NEW)
    assert run(board).token_ids == greedy.token_ids, "the draw from one candidate is greedy"


def test_a_visitor_chooses_among_names_only(board):
    """No path, no address: the demo stands on the open web."""
    assert [value for _, value in board.switches.model.control.options] == labkit.models()
    with pytest.raises(traitlets.TraitError):
        board.switches.model.value = "../../etc/passwd"


def test_an_extra_sees_the_run(default_model):
    import ipywidgets

    class Extra:
        widget = ipywidgets.HTML()
        seen: list = []  # noqa: RUF012

        def started(self, settings, model):
            self.seen.append(("started", settings.words["new tokens"], model is default_model))

        def finished(self, settings, completion):
            self.seen.append(("finished", completion.trace.n_tokens))

    shelf.put(default_model)
    extra = Extra()
    board = Switchboard(prompt="one_word", max_new_tokens=2, extras=[extra])
    completion = run(board)
    assert extra.seen == [("started", "2", True), ("finished", len(completion.token_ids))]


def test_a_model_that_cannot_be_loaded_is_told(board, monkeypatch):
    def fail(name, **options):
        raise ConnectionError("no network: copy the wheel here")

    monkeypatch.setattr(labkit, "load", fail)
    shelf.clear()
    board.run_button.click()
    with pytest.raises(ConnectionError):
        board.wait(60)
    assert "No network" in board.error.value
    assert "copy the wheel here" in board.error.value
