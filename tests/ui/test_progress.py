"""What a learner did is kept in one local file, survives damage, and is kept of no visitor."""

from __future__ import annotations

import json

import pytest

from labkit.ui import lesson, progress

GOALS = ["see", "say", "do"]
QUESTIONS = [(f"q{i}", {"yes": "because", "no": "since"}, "yes") for i in range(3)]


@pytest.fixture
def file(monkeypatch, tmp_path):
    where = tmp_path / "of one learner" / "progress.json"
    monkeypatch.setenv("LABKIT_PROGRESS", str(where))
    monkeypatch.setattr(progress, "_current", "")
    return where


def square(x):
    return x * x


def exercise():
    return lesson.Exercise("square", cases=[(2,), (3,)], oracle=square, hints=("a", "b", "c"))


def answer(quiz, *answers):
    for radio, button, text in zip(quiz.radios, quiz.check_buttons, answers, strict=True):
        radio.value = text
        button.click()


def test_an_exercise_and_a_quiz_are_remembered(file):
    lesson.header("Title", goals=GOALS, minutes=5, level="easy", notebook="01_tokenizer.ipynb")
    assert not file.exists(), "opening a lesson is not progress"
    assert not lesson.check(lambda x: x + x, exercise())
    assert not file.exists()
    assert lesson.check(square, exercise())
    answer(lesson.quiz(*QUESTIONS), "yes", "no", "yes")
    assert progress.lessons() == {"01_tokenizer": {"exercise": True, "quiz": 2}}
    assert "Exercise passed, quiz 2 of 3 right. 0 of 15 lessons" in progress.words("01_tokenizer.ipynb")
    answer(lesson.quiz(*QUESTIONS), "no", "no", "no")
    assert progress.lessons()["01_tokenizer"]["quiz"] == 2, "a worse try takes nothing away"
    answer(lesson.quiz(*QUESTIONS), "yes", "yes", "yes")
    assert "1 of 15 lessons finished" in progress.words("01_tokenizer.ipynb")
    assert [path.name for path in file.parent.iterdir()] == ["progress.json"], "nothing unfinished is left"


@pytest.mark.parametrize(
    ("name", "value"), [("SERVER_SOFTWARE", "voila/0.5"), ("LABKIT_KIOSK", "1"), ("LABKIT_PROGRESS", "off")]
)
def test_of_a_visitor_nothing_is_kept(file, monkeypatch, name, value):
    progress.begin("01_tokenizer.ipynb")
    monkeypatch.setenv(name, value)
    assert lesson.check(square, exercise())
    answer(lesson.quiz(*QUESTIONS), "yes", "yes", "yes")
    assert not file.parent.exists()
    assert progress.words("01_tokenizer.ipynb") == ""


@pytest.mark.parametrize(
    "damaged", ["", "[]", "{", '{"lessons": 3}', '{"lessons": {"01_tokenizer": 1}}', "{" * 70_000, '{"lessons": null}']
)
def test_a_damaged_file_is_begun_anew(file, damaged):
    file.parent.mkdir(parents=True)
    file.write_text(damaged, encoding="utf-8")
    progress.begin("01_tokenizer.ipynb")
    assert progress.lessons() == {}
    progress.note(quiz=1)
    assert json.loads(file.read_text())["lessons"] == {"01_tokenizer": {"exercise": False, "quiz": 1}}


def test_values_out_of_range_are_not_believed(file):
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"lessons": {"01_tokenizer": {"exercise": "<b>", "quiz": 99}}}), encoding="utf-8")
    assert progress.lessons() == {"01_tokenizer": {"exercise": False, "quiz": 3}}


def test_a_folder_that_cannot_be_written_to_stops_nobody(file):
    file.parent.parent.mkdir(parents=True, exist_ok=True)
    file.parent.write_text("a file where the folder should be", encoding="utf-8")
    progress.begin("01_tokenizer.ipynb")
    progress.note(exercise=True)
    assert progress.lessons() == {}


def test_a_header_says_how_hard_and_how_far(file, monkeypatch):
    shown = []
    monkeypatch.setattr("labkit.ui.html.show", shown.append)
    for level in ("easy", "medium", "hard"):
        lesson.header("Title", goals=GOALS, minutes=5, level=level, notebook="01_tokenizer.ipynb")
        assert f"5 minutes · {level}" in shown[-1]
        assert "Your progress" in shown[-1]
    lesson.header("Title", goals=GOALS, minutes=5, notebook="01_tokenizer.ipynb")
    assert "labkit · 5 minutes</div>" in shown[-1], "a learner's copy of a lesson from before there was a level"
    with pytest.raises(ValueError, match="easy, medium or hard"):
        lesson.header("Title", goals=GOALS, minutes=5, level="impossible")
