"""A lesson's parts, driven the way a notebook drives them."""

from __future__ import annotations

import re

import plotly.graph_objects as go
import pytest
import torch

from labkit.decoding.sampling import keep_top_k
from labkit.ui import lesson
from labkit.ui.experiment import Experiment, Result
from labkit.ui.session import ModelShelf

GOALS = ["see", "say", "do"]


def square(**more):
    fields = {"cases": [(2,), (3,)], "oracle": lambda x: x * x, "hints": ("a", "b", "c")} | more
    return lesson.Exercise("square", **fields)


def shown(capsys) -> str:
    return capsys.readouterr().out


def test_a_header_has_three_goals():
    lesson.header("Title", goals=GOALS, minutes=5, level="easy", notebook="04_pipeline_timed.ipynb")
    with pytest.raises(ValueError, match="three goals, got 2"):
        lesson.header("Title", goals=GOALS[:2], minutes=5, level="easy")


def test_setup_finds_what_is_here():
    lab = lesson.setup()
    assert lab.ok
    assert {name for _, name, *_ in lab.checks} == {"Python", "Packages", "Device", "Model"}
    assert "Everything this lesson needs is here" in lab._repr_html_()


def test_setup_names_the_remedy():
    lab = lesson.setup("no-such-model", packages=["no_such_package"])
    assert not lab.ok
    page = lab._repr_html_()
    assert "missing: no_such_package" in page
    assert "pip install no_such_package" in page
    assert "smollm2-135m-instruct" in page


def test_a_numeric_guess():
    guess = lesson.predict("How fast?", unit="tok/s")
    guess.keep_button.click()  # ipywidgets shows a callback's exception in a kernel, and only logs it here
    assert "no guess yet" in guess.error.value
    guess.input.value = "many"
    guess.keep_button.click()
    assert "not a number" in guess.error.value
    guess.input.value = " 12,5 "
    guess.keep_button.click()
    assert guess.guess == 12.5
    assert "2.0 times as much" in guess.verdict(25.0)
    assert "well judged" in guess.verdict(12.6)
    guess.skip_button.click()
    assert guess.guess is None
    assert guess.verdict(25.0) == "It was 25.0 tok/s."


def test_a_guess_among_choices():
    guess = lesson.predict("Which?", choices=["attention", "ffn"])
    guess.input.value = "ffn"
    guess.keep_button.click()
    assert guess.verdict("ffn") == "You guessed it."
    assert "it was" in guess.verdict("attention")


def test_check_tells_open_wrong_and_right_apart(monkeypatch):
    assert not lesson.check(lambda x: ..., square())
    wrong = lesson.check(lambda x: x + x, square())
    assert not wrong
    assert "gave 6, expected 9" in wrong.message
    assert "raised ZeroDivisionError" in lesson.check(lambda x: 1 / 0, square()).message
    assert lesson.check(lambda x: x * x, square())
    monkeypatch.setenv("LABKIT_TEST", "solution")
    with pytest.raises(AssertionError, match="does not pass"):
        lesson.check(lambda x: x + x, square())


def test_check_compares_tensors_and_leaves_the_cases_alone():
    case = torch.tensor([1.0, 3.0, 2.0])
    exercise = lesson.Exercise("top k", cases=[(case, 2)], oracle=keep_top_k, hints=("a", "b", "c"))

    def own(logits, k):
        logits[logits < logits.topk(k).values[-1]] = float("-inf")
        return logits

    assert lesson.check(own, exercise)
    assert case.tolist() == [1.0, 3.0, 2.0]
    assert not lesson.check(lambda logits, k: logits, exercise)


def test_an_exercise_has_three_hints():
    with pytest.raises(ValueError, match="2 hints"):
        square(hints=("a", "b"))


def test_a_quiz_explains_wrong_answers():
    quiz = lesson.quiz(*[(f"q{i}", {"yes": "because", "no": "since <x>"}, "yes") for i in range(3)])
    quiz.radios[0].value = "no"
    quiz.check_buttons[0].click()
    assert "Not quite" in quiz.notes[0].value
    assert "since &lt;x&gt;" in quiz.notes[0].value
    quiz.radios[0].value = "yes"
    quiz.check_buttons[0].click()
    assert quiz.score == 1
    with pytest.raises(ValueError, match="3 quiz items"):
        lesson.quiz(("q", {"a": "x", "b": "y"}, "a"))
    with pytest.raises(ValueError, match="needs its explanation"):
        lesson.quiz(*[("q", {"a": "x", "b": ""}, "a")] * 3)


def test_source_is_real_lines(capsys):
    lesson.show_source("labkit.decoding.sampling.keep_top_p")
    lesson.show_source(keep_top_k, 1, "return logits")
    with pytest.raises(ValueError, match="choose 1 to"):
        lesson.show_source("labkit.pipeline")
    with pytest.raises(ValueError, match="has no 'nowhere'"):
        lesson.show_source("labkit.pipeline.nowhere")
    with pytest.raises(ValueError, match="no line contains"):
        lesson.show_source(keep_top_k, "never there")


def test_highlighting_keeps_every_character():
    import html as stdlib_html
    import inspect
    import re

    from labkit.ui import experiment, source

    code = inspect.getsource(experiment).rstrip("\n")
    plain = stdlib_html.unescape(re.sub(r"</?span[^>]*>", "", source._highlight(code)))
    assert plain == code


def measure(job, *, n, word):
    for idx in range(n):
        job.progress(idx / n, f"{idx}")
    figure = go.Figure(go.Scatter(x=[1], y=[2]))
    return Result(figure, [{"n": n}], "It is so.", data=(n, word, list(job.history)))


def experiment(**more) -> Experiment:
    fields = {"n": lesson.slider("N", 1, 9, 3), "word": lesson.choice("Word", ["a", "b"])}
    return lesson.Experiment("How?", measure, fields, **more)


def test_an_experiment_runs_remembers_and_resets():
    panel = experiment(confounders=("word",))
    panel.run_button.click()
    assert panel.wait(30).data == (3, "a", [])
    assert panel.status.state == "done"
    assert "application/vnd.plotly.v1+json" in panel.figure.outputs[0]["data"]
    assert "The figure as a table" in panel.below.value
    panel.fields["n"].value = 4
    panel.run_button.click()
    n, _, history = panel.wait(30).data
    assert n == 4
    assert len(history) == 1
    panel.fields["word"].value = "b"
    assert panel.results == [], "a confounder clears what is no longer comparable"
    panel.reset_button.click()
    assert panel.values == {"n": 3, "word": "a"}


def test_nothing_is_revealed_before_the_guess(monkeypatch):
    monkeypatch.setenv("LABKIT_TEST", "0")
    guess = lesson.predict("How many?", unit="dots")
    panel = experiment(guess=guess)
    panel.run_button.click()
    panel.wait(30)
    verdict = lesson.verdict(guess, 8.0, "A **finding**.")
    table = lesson.table([{"n": 8}], after=guess)
    for covered in (panel.below.value, *(reveal.children[0].value for reveal in (verdict, table))):
        assert "waits for your guess" in covered
        assert "finding" not in covered
        assert "8" not in re.sub(r"<style>.*?</style>", "", covered, flags=re.S)
    assert panel.figure.outputs == ()

    guess.input.value = "4"
    guess.keep_button.click()
    assert "You guessed 4.00 dots; it was 8.00 dots" in verdict.children[0].value
    assert "<b>finding</b>" in verdict.children[0].value
    assert ">8<" in table.children[0].value
    assert "your guess: 4.00 dots" in str(panel.figure.outputs)

    guess.input.value = "8"
    guess.keep_button.click()
    assert "well judged" in verdict.children[0].value, "a guess that comes later updates its verdict"


@pytest.mark.parametrize("how", ["skip", "kiosk"])
def test_who_does_not_guess_sees_it_too(monkeypatch, how):
    monkeypatch.setenv("LABKIT_TEST", "0")
    if how == "kiosk":
        monkeypatch.setenv("LABKIT_KIOSK", "1")
    guess = lesson.predict("How many?")
    if how == "skip":
        guess.skip_button.click()
    assert "It was 8.00" in lesson.verdict(guess, 8.0).children[0].value


def test_a_guess_below_what_can_be_is_refused(monkeypatch):
    monkeypatch.setenv("LABKIT_TEST", "0")
    guess = lesson.predict("How many?")
    guess.input.value = "-3"
    guess.keep_button.click()
    assert "cannot be" in guess.error.value
    assert guess.guess is None


def test_an_experiment_shows_its_failure():
    def fail(job):
        raise ValueError("no room for this")

    panel = lesson.Experiment("How?", fail, {})
    panel.run_button.click()
    with pytest.raises(ValueError, match="no room"):
        panel.wait(30)
    assert "no room for this" in panel.error.value
    assert panel.status.state == "error"
    assert not panel.run_button.disabled


def test_an_experiment_is_one_question():
    five = {f"c{i}": lesson.toggle(f"c{i}") for i in range(5)}
    with pytest.raises(ValueError, match="at most 4"):
        lesson.Experiment("How?", measure, five)
    with pytest.raises(ValueError, match="label the figure"):
        lesson.Experiment("How?", measure, {}, kind="guessed")


def test_the_shelf_loads_once(monkeypatch):
    import labkit

    loads = []
    monkeypatch.setattr(labkit, "load", lambda name, **options: loads.append((name, options)) or object())
    shelf = ModelShelf()
    first = shelf.get("m")
    assert shelf.get("m", dtype="auto") is first, "defaults spelled out are the same model"
    assert shelf.get("m", dtype="bf16") is not first
    assert len(loads) == 2
    assert shelf.holds("m", dtype="bf16")
    assert shelf.peek("m") is None
