"""Notebooks are thin, stripped and alike: what CONTRIBUTING.md asks of them, checked without running them."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from labkit.ui.repository import setup_lines

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LESSONS = [path for path in NOTEBOOKS if re.match(r"\d\d_", path.name)]
DEMOS = [path for path in NOTEBOOKS if path.name.startswith("demo_")]

MAX_CODE_LINES = 25
N_LESSONS = 15
LESSON_CELLS = range(12, 27)
LESSON_WORDS = range(700, 1401)
MAX_BYTES = 60_000
SECTIONS = ("Predict", "Run", "Explain", "Look inside", "Modify", "Where it loses", "Three questions")
"""A lesson's headings, in this order; others may stand between them."""
EXERCISE_TAGS = {"exercise", "solution"}
"""Only the learner's own cells define functions: the stub and its folded solution."""

pytestmark = pytest.mark.skipif(not NOTEBOOKS, reason="no notebooks here")


def name_of(path: Path) -> str:
    return path.name


@cache
def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def tags(cell: dict[str, Any]) -> set[str]:
    return set(cell["metadata"].get("tags", []))


def code_cells(path: Path) -> list[tuple[int, dict[str, Any]]]:
    return [(idx, cell) for idx, cell in enumerate(read(path)["cells"]) if cell["cell_type"] == "code"]


def markdown(path: Path) -> str:
    return "\n\n".join(source(cell) for cell in read(path)["cells"] if cell["cell_type"] == "markdown")


def parse(cell: dict[str, Any]) -> ast.Module:
    """The cell's Python. Magics are not Python, and a lesson needs none: they fail here."""
    return ast.parse(source(cell))


def test_names():
    wrong = [path.name for path in NOTEBOOKS if path not in LESSONS and path not in DEMOS]
    assert not wrong, f"call a lesson NN_topic.ipynb and a demo demo_topic.ipynb: {wrong}"
    numbers = [path.name[:2] for path in LESSONS]
    assert len(numbers) == len(set(numbers)), f"two lessons with one number: {numbers}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_format(path):
    book = read(path)
    assert (book["nbformat"], book["nbformat_minor"]) >= (4, 5), "notebook format 4.5 or newer: cells have ids"
    ids = [cell["id"] for cell in book["cells"]]
    assert len(ids) == len(set(ids))
    assert "widgets" not in book["metadata"], "leftover widget state: GitHub shows 'Invalid Notebook'"
    assert book["metadata"].get("kernelspec", {}).get("name", "python3") == "python3"
    assert path.stat().st_size < MAX_BYTES, "too big: are there outputs or pictures in it?"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_stripped(path):
    for idx, cell in code_cells(path):
        assert not cell["outputs"], f"cell {idx} has outputs: make format strips them"
        assert cell["execution_count"] is None, f"cell {idx} has an execution count: make format strips it"
    assert not any(cell.get("attachments") for cell in read(path)["cells"]), "no pictures inside a notebook"


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").rglob("[0-9d]*_*.ipynb")), ids=name_of)
def test_pictures_are_found_by_jupyter_and_by_voila(path):
    """Jupyter looks beside the notebook. Voila looks in the notebooks' root, and a way out of it (``..``) leaves its
    page loading for ever."""
    shown = [picture for cell in read(path)["cells"] for picture in re.findall(r"!\[.*?\]\((.+?)\)", source(cell))]
    for picture in shown:
        assert ".." not in picture
        assert (path.parent / picture).read_bytes() == (ROOT / "notebooks" / picture).read_bytes()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_code_cells_are_thin(path):
    for idx, cell in code_cells(path):
        n_lines = len(source(cell).splitlines())
        assert n_lines <= MAX_CODE_LINES, f"cell {idx} has {n_lines} lines: move what is not the point into labkit"
        for node in ast.walk(parse(cell)):
            assert not isinstance(node, ast.ClassDef), f"cell {idx}: a class belongs into labkit"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert tags(cell) & EXERCISE_TAGS, f"cell {idx}: def {node.name} outside an exercise cell"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_code_cells_are_honest(path):
    """No installs behind the learner's back, no faked time, no swallowed errors, no private names of labkit."""
    for idx, cell in code_cells(path):
        for node in ast.walk(parse(cell)):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"time.sleep", "sleep", "eval", "exec"}, f"cell {idx}: {called}"
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"cell {idx}: bare except"
            if isinstance(node, ast.Attribute):
                is_private = node.attr.startswith("_") and not node.attr.startswith("__")
                assert not is_private, f"cell {idx}: {node.attr} is private"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_tags_are_ones_that_nbval_reads(path):
    known = EXERCISE_TAGS | {"nbval-ignore-output", "nbval-skip", "raises-exception", "remove-input"}
    for idx, cell in enumerate(read(path)["cells"]):
        assert tags(cell) <= known, f"cell {idx}: unknown tags {tags(cell) - known}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", markdown(path)):
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            continue
        assert not target.startswith("/"), f"{target}: a path of one machine"
        assert (path.parent / target.split("#")[0]).exists(), f"{target}: no such file"


@pytest.mark.parametrize("path", LESSONS, ids=name_of)
def test_a_lesson_has_its_parts(path):
    text = markdown(path)
    n_cells, n_words = len(read(path)["cells"]), len(re.findall(r"\w[\w'-]*", re.sub(r"https?://\S+", "", text)))
    assert n_cells in LESSON_CELLS, f"{n_cells} cells: a lesson has {LESSON_CELLS.start} to {LESSON_CELLS.stop - 1}"
    assert n_words in LESSON_WORDS, f"{n_words} words: a lesson has {LESSON_WORDS.start} to {LESSON_WORDS.stop - 1}"
    assert text.startswith("# "), "the first text is the title"
    everything = "".join(source(cell) for cell in read(path)["cells"])
    assert path.name in everything, "the badges (lesson.header) name the notebook itself"
    code = "\n".join(source(cell) for _, cell in code_cells(path))
    assert re.search(r"minutes=\d+,\n\s+level=\"(easy|medium|hard)\"", code), "a header says how long and how hard"


@pytest.mark.parametrize("path", DEMOS, ids=name_of)
def test_a_demo_is_short(path):
    assert len(read(path)["cells"]) <= 8, "a demo is one panel, full page"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_it_opens_anywhere(path):
    """The first code cell begins with the set-up lines that `make badges` wrote: unmodified, it runs on Colab."""
    assert source(code_cells(path)[0][1]).startswith(setup_lines()), "run: make badges REPO=..."


@pytest.mark.parametrize("path", LESSONS, ids=name_of)
def test_a_lesson_has_its_sections_in_order(path):
    headings = re.findall(r"^## (.+)$", markdown(path), flags=re.M)
    assert [heading for heading in headings if heading in SECTIONS] == list(SECTIONS)


def test_lessons_lead_from_the_first_to_the_last():
    """Each to a later one; in the whole course of fifteen, each to the next."""
    for path, following in pairwise(LESSONS):
        after = markdown(path).rsplit("**Next:**", 1)
        assert len(after) == 2, f"{path.name} ends with **Next:** and a link"
        link = re.search(r"\]\(([^)\s]+)\)", after[1])
        if link is None or len(LESSONS) == N_LESSONS:
            assert link is not None, f"{path.name} leads nowhere"
            assert link[1] == following.name, f"{path.name} leads to {link[1]}"
        assert link[1] > path.name, f"{path.name} leads back to {link[1]}"


@pytest.mark.parametrize("path", LESSONS, ids=name_of)
def test_a_lesson_takes_what_it_measured(path):
    """No conclusion before the guess, none written in advance, and no page that ends where two texts differ."""
    code = "\n".join(source(cell) for _, cell in code_cells(path))
    assert "lesson.predict(" in code
    assert "lesson.verdict(guess" in code, "the verdict waits for the guess: lesson.verdict(guess, actual, ...)"
    assert "guess.verdict(" not in code, "lesson.verdict waits for the guess; guess.verdict does not"
    for _, cell in code_cells(path):
        for node in ast.walk(parse(cell)):
            if isinstance(node, ast.Assert):
                said = ast.unparse(node.test)
                assert "token_ids ==" not in said, f"{said}: a difference is a finding (findings.same_text)"
