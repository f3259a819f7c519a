"""Lessons in another language: the same code as the English ones, the prose translated, no part missing."""

from __future__ import annotations

import ast
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from labkit.ui.words import ENGLISH, catalogue, languages
from tests.ui.prose import sentences_of
from tests.ui.test_words import SAME_IN_EVERY_LANGUAGE

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
LESSONS = sorted(NOTEBOOKS.glob("*/[0-9][0-9]_*.ipynb"))
HEADINGS = {
    "zh-CN": ("先猜一猜", "运行", "解释", "看看里面", "动手改", "什么时候不成立", "三个问题"),
}
"""Predict, Run, Explain, Look inside, Modify, Where it loses, Three questions."""
NEXT = {"zh-CN": "**下一课：**"}


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def cells(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def prose(path: Path) -> str:
    return "\n\n".join(source(cell) for cell in cells(path) if cell["cell_type"] == "markdown")


def test_the_promised_lessons_are_here():
    found = [name_of(path) for path in LESSONS]
    assert found == [f"zh-CN/{name}.ipynb" for name in ("00_start_here", "04_pipeline_timed", "07_prefill_vs_decode")]
    assert {path.parent.name for path in LESSONS} == set(languages()) - {ENGLISH}


@pytest.mark.parametrize("path", LESSONS, ids=name_of)
def test_the_code_is_the_english_lessons(path):
    """Cell by cell, but for the line that chooses the language, and the notebook's own address."""
    language, ours, theirs = path.parent.name, cells(path), cells(NOTEBOOKS / path.name)
    assert [cell["cell_type"] for cell in ours] == [cell["cell_type"] for cell in theirs]
    chosen = f'lesson.language("{language}")\n'
    assert sum(source(cell).count(chosen) for cell in ours) == 1
    for mine, original in zip(ours, theirs, strict=True):
        assert (mine["id"], mine["metadata"]) == (original["id"], original["metadata"])
        if mine["cell_type"] == "code":
            assert mine["outputs"] == [] and mine["execution_count"] is None, "make format strips it"  # noqa: PT018
            code = source(mine).replace(chosen, "").replace(f'"{name_of(path)}"', f'"{path.name}"')
            assert code == source(original)
        else:
            fenced = [re.findall(r"```python\n.*?```", source(cell), flags=re.S) for cell in (mine, original)]
            assert fenced[0] == fenced[1], "the solution is the same code"
            assert source(mine) != source(original) or not re.search("[a-z]{3}", source(original)), "not translated"


@pytest.mark.parametrize("path", LESSONS, ids=name_of)
def test_what_the_code_says_is_in_the_catalogue(path):
    entries = catalogue(path.parent.name).words
    for cell in cells(path):
        if cell["cell_type"] == "code":
            found = [(text, whole) for _, text, whole in sentences_of(ast.parse(source(cell)))]
            missing = [text for text, _ in found if text not in entries and text not in SAME_IN_EVERY_LANGUAGE]
            assert not missing, f"{name_of(path)}: {missing}"


@pytest.mark.parametrize("path", LESSONS, ids=name_of)
def test_the_prose_has_every_part_and_speaks_its_language(path):
    language, text = path.parent.name, prose(path)
    headings = re.findall(r"^## (.+)$", text, flags=re.M)
    assert [heading for heading in headings if heading in HEADINGS[language]] == list(HEADINGS[language])
    plain = re.sub(r"```.*?```|`[^`]*`|<[^>]*>|\]\([^)]*\)", " ", text, flags=re.S)
    sentences = re.findall(r"(?:[A-Za-z]{2,}[ ,]+){4,}[A-Za-z]{2,}", plain)
    assert not sentences, f"English left: {sentences}"
    assert f"(../{path.name})" in text, "a link to the English lesson"


@pytest.mark.parametrize("path", LESSONS, ids=name_of)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        assert re.match(r"[a-z]+:", target) or (path.parent / target.split("#")[0]).exists(), f"{target}: no such file"


def test_each_leads_to_the_next_one():
    for path, following in pairwise(LESSONS):
        after = prose(path).rsplit(NEXT[path.parent.name], 1)
        assert len(after) == 2, f"{name_of(path)} ends with {NEXT[path.parent.name]} and a link"
        assert re.findall(r"\]\(([^)\s]+)\)", after[1])[0] == following.name
