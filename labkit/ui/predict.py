"""Guess first, then measure: a number or a choice, taken before Run. Skip keeps the page going."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import ipywidgets as w

from labkit.ui import controls, html
from labkit.ui.errors import ErrorBox, guarded


class Guess:
    """One question and the reader's answer. ``guess`` is None until they answer, and when they skip."""

    def __init__(self, question: str, *, unit: str = "", choices: Sequence[str] = (), key: str = "") -> None:
        self.question, self.unit, self.key = question, unit, key
        self.guess: Any = None
        self.skipped = False
        self.error = ErrorBox()
        self.note = w.HTML()
        if choices:
            self.input: Any = w.RadioButtons(options=list(choices), value=None, layout={"width": "auto"})
        else:
            self.input = w.Text(placeholder="a number", layout={"width": "140px"})
        field = w.VBox([self.input])
        field.add_class("lk-field")
        self.keep_button = controls.button("Keep my guess", guarded(self.error, self._keep), primary=True)
        self.skip_button = controls.button("Skip", guarded(self.error, self._skip))
        suffix = [w.HTML(f'<span class="lk-muted">{escape(unit)}</span>')] if unit and not choices else []
        head = w.HTML(f'<div class="lk-eyebrow">Predict</div><div class="lk-title">{html.prose(question)}</div>')
        buttons = [self.keep_button, self.skip_button]
        lines = [field, controls.row(*buttons)] if choices else [controls.row(field, *suffix, *buttons, middle=True)]
        self.widget = controls.stack(head, *lines, self.error, self.note, panel=True)

    def _keep(self) -> None:
        value = self.input.value
        if isinstance(self.input, w.Text):
            value = as_number(value)
        if value is None:
            raise ValueError("there is no guess yet: choose or type one, or press Skip.")
        self.guess, self.skipped = value, False
        self.error.clear()
        self._say(f"Kept: <b>{escape(self.text)}</b>. Now run it.")

    def _skip(self) -> None:
        self.guess, self.skipped = None, True
        self.error.clear()
        self._say("Skipped. You can still answer before you run.")

    def _say(self, text: str) -> None:
        self.note.value = f'<div class="lk-muted" role="status">{text}</div>'

    @property
    def text(self) -> str:
        if self.guess is None:
            return "no guess"
        return f"{html.number(self.guess)} {self.unit}".strip() if isinstance(self.guess, float) else str(self.guess)

    def verdict(self, actual: float | str) -> str:
        """The guess beside what was measured, in one sentence.

        >>> guess = Guess("How fast?", unit="tok/s"); guess.guess = 30.0
        >>> guess.verdict(60.0)
        'You guessed 30.0 tok/s; it was 60.0 tok/s: 2.0 times as much.'
        """
        unit = f" {self.unit}" if self.unit else ""
        if self.guess is None:
            return f"It was “{actual}”." if isinstance(actual, str) else f"It was {html.number(actual)}{unit}."
        if isinstance(actual, str) or isinstance(self.guess, str):
            return "You guessed it." if self.guess == actual else f"You guessed “{self.guess}”; it was “{actual}”."
        found = f"You guessed {html.number(self.guess)}{unit}; it was {html.number(float(actual))}{unit}"
        if self.guess <= 0 or actual <= 0:
            return f"{found}."
        ratio = actual / self.guess
        if math.isclose(ratio, 1, abs_tol=0.1):
            return f"{found}: well judged."
        words = f"{ratio:.1f} times as much" if ratio > 1 else f"{1 / ratio:.1f} times less"
        return f"{found}: {words}."

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.widget)


def predict(question: str, *, unit: str = "", choices: Sequence[str] = (), key: str = "") -> Guess:
    """Ask before the run: a number with ``unit``, or one of ``choices``. Show it as a cell's last line.

    ``guess.guess`` holds the answer (float, str, or None), ``guess.verdict(actual)`` compares.
    """
    if choices and len(choices) < 2:
        raise ValueError("a question with choices needs at least two of them.")
    return Guess(question, unit=unit, choices=choices, key=key)


def as_number(text: str) -> float | None:
    """What was typed as a figure, None for nothing. Raises ValueError for anything else."""
    text = text.strip().replace(" ", "").replace(",", ".") if text else ""
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a number: type figures only, such as 12.5.")
    return value
