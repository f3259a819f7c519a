"""The catalogue: no sentence of the pages is missing in it, and none is left over."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from string import Formatter

import pytest

import labkit
from labkit import registry
from labkit.perf.verdict import CAUSES, REMEDIES
from labkit.prompts import ready_prompts
from labkit.ui import words
from labkit.ui.panels import batching, embedding_map
from tests.ui.prose import sentences_of, strings_of

ROOT = Path(__file__).resolve().parents[2]
UI = ROOT / "labkit" / "ui"
CHINESE = "zh-CN"
ENTRIES = words.catalogue(CHINESE).words

NOT_YET = {
    "panels/token_bill.py",
    *("panels/attention.py", "panels/capstone.py"),
    *("panels/inside.py", "panels/kv_cache.py"),
    *("panels/long_context.py", "panels/mystery.py", "panels/own_server.py", "panels/paging.py"),
    *("panels/quantization.py", "panels/quantization_exercise.py"),
    *("panels/quantization_layers.py", "panels/rope.py"),
    *("panels/sampling.py", "panels/shrink.py", "panels/speculative.py"),
    "panels/tokenizer.py",
}
"""Still in English, whatever the language; every other file of the pages is held to the catalogue."""
NO_WORDS = {"theme.py", "repository.py", "__init__.py", "session.py", "words/__init__.py"}
"""Styles, addresses, documentation: nothing in them is read on a page."""
SAME_IN_EVERY_LANGUAGE = {
    *("pip install ", "pip install {}", "torch {}, labkit {}", "model name", "bottom right"),
    *("Once upon a time", "Explain in three sentences why the sky is blue.", "The capital of France is"),
    *("The keys to the old wooden cabinet are on the", "top center", embedding_map.WORDS),
    *("Why is the sky blue?", "decode steps of static batches", *batching.SUBJECTS),
    *("the ceiling of decode", "inter-token latency", "the roofline", "sliding 128, {} sinks"),
}
"""What code takes, what a model reads, and an exercise's name, which only a failing test says."""
SOURCES = sorted(path.relative_to(UI).as_posix() for path in UI.rglob("*.py"))


@pytest.fixture(autouse=True)
def _back_to_english():
    yield
    words.choose(None)


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in NOT_YET | NO_WORDS])
def test_every_sentence_of_the_pages_is_in_the_catalogue(name):
    tree = ast.parse((UI / name).read_text(encoding="utf-8"))
    found = [(line, text, whole) for line, text, whole in sentences_of(tree) if text not in SAME_IN_EVERY_LANGUAGE]
    pieces = [f"{name}:{line}: {text!r}" for line, text, whole in found if not whole]
    assert not pieces, "an f-string cannot be looked up: say('... {n} ...', n=n)\n" + "\n".join(pieces)
    missing = [f"{name}:{line}: {text!r}" for line, text, whole in found if whole and text not in ENTRIES]
    assert not missing, "not in zh-CN.toml:\n" + "\n".join(missing)


def test_what_is_not_translated_yet_is_still_there():
    assert set(SOURCES) >= NOT_YET | NO_WORDS


def test_every_component_and_ready_made_prompt_is_in_the_catalogue():
    kinds = [kind for kind in registry.KINDS if kind != "model"]  # a model's summary is its address
    infos = [info for kind in kinds for info in labkit.components(kind)]
    said = [info.summary for info in infos] + [option.help for info in infos for option in info.options]
    said += [text for prompt in ready_prompts() for text in (prompt.title, prompt.shows)]
    assert not [text for text in dict.fromkeys(said) if text and text not in ENTRIES]


def test_every_cause_and_remedy_is_in_the_catalogue():
    said = [*REMEDIES.values(), *(text for cause in CAUSES.values() for text in (cause.title, cause.symptom))]
    assert not [text for text in said if text not in ENTRIES]


@pytest.mark.parametrize("name", ["machine", "diagnosis", "verdict"])
def test_what_the_rooms_below_let_be_said_is_in_the_catalogue(name):
    """They import nothing of the pages: whoever shows their sentences hands them ``say``."""
    tree = ast.parse((ROOT / "labkit" / "perf" / f"{name}.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "say"]
    said = [call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)]
    assert said
    assert not [text for text in said if text not in ENTRIES]


@pytest.mark.parametrize("english", ENTRIES)
def test_an_entry_has_the_same_figures_in_both_languages(english):
    assert placeholders(english) == placeholders(ENTRIES[english])
    assert ENTRIES[english].strip()


def placeholders(text: str) -> list[tuple[str, str, str]]:
    """Name, format and conversion of each {placeholder}, in the order of their names."""
    parts = Formatter().parse(text)
    return sorted((name, form or "", conversion or "") for _, name, form, conversion in parts if name is not None)


def test_no_entry_is_left_over():
    """Each one's English still stands somewhere in the code, in a notebook or among the ready-made prompts."""
    used = set().union(*(strings_of(path) for path in (ROOT / "labkit").rglob("*.py")))
    used |= {text for prompt in ready_prompts() for text in (prompt.title, prompt.shows)}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = (ast.parse("".join(cell["source"])) for cell in cells if cell["cell_type"] == "code")
        used |= {n.value for tree in code for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    used |= {text.replace("_", " ") for text in used if isinstance(text, str)}  # phases, as people read them
    assert not [english for english in ENTRIES if english not in used]


def test_a_components_name_is_no_entry():
    """Names are what code takes: they are the same in every language."""
    names = {info.name for kind in registry.KINDS for info in labkit.components(kind)} | {"auto"}
    assert not names & set(ENTRIES)


def test_figures_are_filled_in_and_braces_left_alone():
    words.choose(CHINESE)
    assert words.say("Done in {took:.1f} s.", took=1.25) == "完成，用时 1.2 s。"
    assert words.say("a text with {braces}") == "a text with {braces}"
    assert words.counted(1, "{n} core", "{n} cores") == "1 个核"
    assert words.sentences("一。", "", "二。") == "一。二。"
    words.choose("en")
    assert words.say("Done in {took:.1f} s.", took=1.25) == "Done in 1.2 s."
    assert words.sentences("One.", "", "Two.") == "One. Two."


def test_who_decides_on_the_language(monkeypatch, tmp_path):
    """From the last to the first: English, what was kept, the variable, the visitor's address, the page itself."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    monkeypatch.delenv("LABKIT_LANGUAGE", raising=False)
    words.choose(None)
    assert words.language() == "en"
    assert not words.is_fixed()
    words.choose(CHINESE, keep=True)
    words.choose(None)
    assert words.language() == CHINESE, "kept for later pages"
    monkeypatch.setenv("LABKIT_LANGUAGE", "en")
    assert words.language() == "en"
    assert words.is_fixed()
    monkeypatch.setenv("QUERY_STRING", "theme=dark&language=zh_cn")
    assert words.language() == CHINESE
    words.choose("en")
    assert words.language() == "en"
    assert json.loads((tmp_path / "settings.json").read_text()) == {"language": CHINESE}, "only the menu keeps a choice"


def test_a_damaged_setting_is_no_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    monkeypatch.delenv("LABKIT_LANGUAGE", raising=False)
    for text in ("{", '{"language": "fr"}', "[]", '{"language": ["en"]}'):
        (tmp_path / "settings.json").write_text(text)
        words.choose(None)
        assert words.language() == "en"


def test_an_unknown_language_is_told_with_the_known_ones(monkeypatch):
    with pytest.raises(ValueError, match=re.escape("choose one of en (English), zh-CN (简体中文).")):
        words.choose("fr")
    monkeypatch.setenv("LABKIT_LANGUAGE", "klingon")
    with pytest.raises(ValueError, match="'klingon' in LABKIT_LANGUAGE"):
        words.language()


def test_the_links_of_voila_pages_know_every_language() -> None:
    folder = Path(words.__file__).parents[1] / "static" / "jupyter" / "voila" / "templates" / "labkit"
    for name in ("index.html.j2", "tree-lab.html"):
        text = (folder / name).read_text(encoding="utf-8")
        for code, called in words.languages().items():
            assert {code, called} <= set(re.findall(r"[\w-]+", text)), f"{name} has no link to {code}"
