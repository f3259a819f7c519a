"""A lesson's anatomy as one-line calls: everything a notebook's cells need, from one name.

from labkit.ui import lesson
lesson.language("zh-CN")                    a translated lesson's own line; lesson.say("... {n} ...", n=n) translates
lesson.header("...", goals=[...], minutes=15, level="easy", notebook="06_kv_cache.ipynb")  1  goals, machine
lab = lesson.setup(); lab                                                       2  pass/fail tile; lab.model
guess = lesson.predict("How many ...?", unit="tok/s"); guess                    3  predict
panel = lesson.Experiment("...", work, {"n": lesson.slider(...)}, guess=guess)  4  run
lesson.verdict(guess, 42.0, "What the run found.")                              4  shown once it is settled
lesson.table(panel.results[-1].rows, "...", after=guess)                        5  explain
lesson.show_source("labkit.kvcache.contiguous.ContiguousCache.append")          6  look inside
lesson.check(my_function, exercise)                                             7  modify
lesson.quiz(("question", {"answer": "why", ...}, "right answer"), ...)          9  quiz
"""

from __future__ import annotations

from typing import Any

from IPython.display import HTML

from labkit.ui import html
from labkit.ui.component_picker import ComponentPicker
from labkit.ui.controls import choice, number, slider, text, toggle
from labkit.ui.exercise import Exercise, check
from labkit.ui.experiment import Experiment, ExperimentJob, Result
from labkit.ui.header import Setup, header, setup
from labkit.ui.phase_bars import PhaseBars, phase_rows
from labkit.ui.predict import Guess, predict
from labkit.ui.quiz import Quiz, quiz
from labkit.ui.reveal import Reveal, covered, verdict
from labkit.ui.run_tiles import tiles
from labkit.ui.source import show_source
from labkit.ui.words import choose, say

__all__ = [
    "ComponentPicker",
    "Exercise",
    "Experiment",
    "ExperimentJob",
    "Guess",
    "Quiz",
    "Result",
    "Reveal",
    "Setup",
    "bars",
    "check",
    "choice",
    "component",
    "header",
    "language",
    "note",
    "number",
    "phases",
    "predict",
    "quiz",
    "say",
    "setup",
    "show_source",
    "slider",
    "table",
    "text",
    "toggle",
    "verdict",
]


def language(code: str) -> None:
    """This page's language, whatever the reader chose for others: the first line of a translated lesson."""
    choose(code)


def table(rows: Any, caption: str = "", *, after: Guess | None = None) -> Any:
    """An accessible table from dicts or a DataFrame; figures rounded for reading. ``after``: the guess it waits for."""
    made = html.table(rows, caption)
    return HTML(html.page(made)) if after is None else covered(after, lambda: made)


def bars(completion: Any, *, after: Guess | None = None) -> Any:
    """A finished run as a picture: its figures, its text, one bar a stage. ``after``: the guess it waits for."""
    picture = PhaseBars()
    picture.show(completion.trace, text=completion.text, tiles=tiles(completion.trace))
    return picture if after is None else Reveal(after, lambda: [picture])


def phases(completion: Any, *, after: Guess | None = None) -> Any:
    """The same bars as a table: exclusive milliseconds by phase and stage."""
    caption = "Exclusive milliseconds by phase; together they are the run"
    return table(phase_rows(completion.trace), caption, after=after)


def note(words: str, *, after: Guess | None = None) -> Any:
    """A sentence set apart: what to notice. `code` and **bold** work. ``after``: the guess it waits for."""
    body = f'<div class="lk-note">{html.prose(say(words))}</div>'
    return HTML(html.page(body)) if after is None else covered(after, lambda: body)


def component(kind: str, label: str, **options: Any) -> ComponentPicker:
    """A control drawn from ``labkit.components(kind)``, with the chosen one's own options."""
    return ComponentPicker(kind, label, **options)
