"""The top of a lesson: what it teaches, how long it takes, where to run it, and what it found to run on."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from html import escape
from typing import Any

from IPython.display import display

from labkit.ui import html, progress
from labkit.ui.language_switch import LanguageSwitch
from labkit.ui.machine import this_machine
from labkit.ui.repository import binder_url, colab_url
from labkit.ui.runner import in_foreground
from labkit.ui.session import DEFAULT_MODEL, shelf
from labkit.ui.words import is_fixed, say

LEVELS = ("easy", "medium", "hard")


def header(title: str, *, goals: Sequence[str], minutes: int, level: str = "", notebook: str = "") -> None:
    """Show a lesson's head: its goals (three of them), its length and difficulty, the learner's own progress,
    links to Colab and Binder, this machine, and a menu of languages where that is the reader's to choose.

    ``notebook`` is the file's name, such as "04_pipeline_timed.ipynb"; without it, or while the lab is not published,
    no links are shown.
    """
    if len(goals) != 3:
        raise ValueError(f"a lesson has three goals, got {len(goals)}: name what the reader will be able to do.")
    if level and level not in LEVELS:
        raise ValueError(f"level={level!r}: a lesson is easy, medium or hard.")
    progress.begin(notebook)
    kept = f'<div class="lk-muted" style="margin-top:8px">{progress.words(notebook)}</div>' if notebook else ""
    shown = ["labkit", say("{n} minutes", n=minutes), say(level) if level else ""]
    links = ""
    if notebook and colab_url(notebook):
        colab, binder = escape(colab_url(notebook)), escape(binder_url(notebook))
        links = (
            f'<div class="lk-links" style="margin-top:14px">'
            f'<a href="{colab}" rel="noreferrer">{say("Open in Colab")}</a>'
            f'<a href="{binder}" rel="noreferrer">{say("Open in Binder")}</a></div>'
        )
    facts = "".join(f'<span class="lk-tag">{escape(fact)}</span>' for fact in this_machine().facts)
    html.show(
        '<div class="lk-card">'
        f'<div class="lk-eyebrow">{" · ".join(filter(None, shown))}</div>'
        f'<div class="lk-title" style="font-size:22px;margin-top:2px">{html.prose(say(title))}</div>'
        f'<div style="margin-top:12px" class="lk-muted">{say("When you are through, you can:")}</div>'
        f'<ol class="lk-goals">{"".join(f"<li>{html.prose(say(goal))}</li>" for goal in goals)}</ol>'
        f'<div class="lk-facts" aria-label="{say("this machine")}">{facts}</div>{kept}{links}</div>'
    )
    if not is_fixed():
        display(LanguageSwitch())


class Setup:
    """What a lesson runs on. ``model`` loads on first use and is shared by the whole notebook."""

    def __init__(self, model_name: str, load_options: dict[str, Any]) -> None:
        self.model_name, self.load_options = model_name, load_options
        self.checks: list[tuple[str, str, str, str]] = []
        """(state, name, finding, remedy), state "ok", "warn" or "bad"."""

    @property
    def ok(self) -> bool:
        """True when nothing that the lesson needs is missing."""
        return all(state != "bad" for state, *_ in self.checks)

    @property
    def model(self) -> Any:
        """The lesson's model, loaded once in this process (a few seconds; fetched first when it is not here)."""
        return shelf.get(self.model_name, **self.load_options)

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    def pipeline(self, **switches: Any) -> Any:
        """``labkit.Pipeline(setup.model, **switches)``."""
        import labkit

        return labkit.Pipeline(self.model, **switches)

    def _repr_html_(self) -> str:
        marks = {"ok": ("✓", say("pass")), "warn": ("!", say("note")), "bad": ("✗", say("missing"))}
        tiles = []
        for state, name, finding, remedy in self.checks:
            mark, word = marks[state]
            fix = f'<div class="lk-remedy">{html.prose(remedy)}</div>' if remedy else ""
            tiles.append(
                f'<div class="lk-check"><span class="lk-mark lk-{state}" role="img" aria-label="{word}">{mark}</span>'
                f"<div><b>{escape(say(name))}</b><div class='lk-muted'>{html.prose(finding)}</div>{fix}</div></div>"
            )
        good, bad = "Everything this lesson needs is here.", "Something is missing; here is what to do."
        verdict = say(good) if self.ok else say(bad)
        state = "ok" if self.ok else "bad"
        body = f'<div class="lk-card"><div class="lk-title lk-{state}">{verdict}</div>'
        return html.page(body + f'<div class="lk-checks">{"".join(tiles)}</div></div>')


def setup(model: str | None = DEFAULT_MODEL, *, packages: Sequence[str] = (), **load_options: Any) -> Setup:
    """Check what the lesson needs and show the result as a tile. Call it as a cell's last line.

    ``model=None`` for a lesson that needs none; ``packages`` are importable names beyond labkit's own. Never
    raises for what is missing: it says what to do, and the lesson's own cells then fail with the same words.
    """
    found = Setup(model or DEFAULT_MODEL, load_options)
    version = ".".join(map(str, sys.version_info[:3]))
    state = "ok" if sys.version_info[:2] >= (3, 10) else "bad"
    found.checks.append((state, "Python", version, "" if state == "ok" else say("labkit needs Python 3.10 or newer.")))
    found.checks.append(_packages(packages))
    found.checks.append(_device())
    if model:
        found.checks.append(_model(model))
    if in_foreground():
        _enable_colab_widgets()
    return found


def _packages(extra: Sequence[str]) -> tuple[str, str, str, str]:
    import importlib.util
    from importlib.metadata import version

    missing = [name for name in ("ipywidgets", "anywidget", "plotly", *extra) if importlib.util.find_spec(name) is None]
    if missing:
        remedy = say(
            "Run `make lab` again, or `{command}`, then restart the kernel.", command=f"pip install {' '.join(missing)}"
        )
        return ("bad", "Packages", say("missing: {names}", names=", ".join(missing)), remedy)
    return ("ok", "Packages", f"torch {version('torch')}, labkit {version('labkit')}", "")


def _device() -> tuple[str, str, str, str]:
    machine = this_machine()
    if machine.gpu:
        return ("ok", "Device", machine.gpu, "")
    return ("ok", "Device", say("CPU, {n} cores: every lesson is made to work here", n=machine.n_cores), "")


def _model(name: str) -> tuple[str, str, str, str]:
    import labkit

    if name not in labkit.models():
        remedy = say("Choose one of {names}.", names=", ".join(labkit.models()))
        return ("bad", "Model", say("`{model}` is not known here", model=name), remedy)
    if shelf.holds(name):
        return ("ok", "Model", say("`{model}`, loaded", model=name), "")
    present = _is_cached(name)
    if present is False:
        remedy = say(
            "The first use fetches it with a progress bar. Offline? Run `labkit fetch` once where there is a network."
        )
        return ("warn", "Model", say("`{model}` is not in the cache yet", model=name), remedy)
    return ("ok", "Model", say("`{model}`, loads on first use", model=name), "")


def _is_cached(name: str) -> bool | None:
    """Whether the default model's file lies in the cache; None for models that come otherwise."""
    from labkit.checkpoint.fetch import cached_path

    return cached_path() is not None if name == DEFAULT_MODEL else None


def _enable_colab_widgets() -> None:
    if os.environ.get("COLAB_NOTEBOOK_ID"):
        from google.colab import output  # type: ignore[import-not-found]

        output.enable_custom_widget_manager()
