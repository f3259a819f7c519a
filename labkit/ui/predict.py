"""Guess first, then measure: a number or a choice, taken before Run. What answers it waits until it is kept or skipped.

A page that nobody answers (a test, or a kiosk: LABKIT_KIOSK=1) counts as skipped, so it runs through.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import ipywidgets as w

from labkit.ui import controls, html
from labkit.ui.errors import ErrorBox, guarded, under_test

WAITING = "The answer waits for your guess above: **Keep my guess**, or **Skip**."


class Guess:
    """One question and the reader's answer. ``guess`` is None until they answer, and when they skip.

    ``low``: the least number that makes sense as an answer (None: any)."""

    def __init__(
        self, question: str, *, unit: str = "", choices: Sequence[str] = (), key: str = "", low: float | None = 0.0
    ) -> None:
        self.question, self.unit, self.key, self.low = question, unit, key, low
        self.guess: Any = None
        self.skipped = False
        self._waiting: list[Callable[[], None]] = []
        self.error = ErrorBox()
        self.note = w.HTML()
        if choices:
            self.input: Any = w.RadioButtons(options=list(choices), value=None, layout={"width": "auto"})
        else:
            self.input = w.Text(placeholder="a number", layout={"width": "140px"})
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # the only event that Enter alone sends
                self.input.on_submit(lambda _: guarded(self.error, self._keep)())
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
        if isinstance(value, float) and self.low is not None and value < self.low:
            raise ValueError(f"{html.number(value)} cannot be: the answer is {html.number(self.low)} or more.")
        self.guess, self.skipped = value, False
        self.error.clear()
        self._say(f"Kept: <b>{escape(self.text)}</b>. Now run it.")
        self._tell()

    def _skip(self) -> None:
        self.guess, self.skipped = None, True
        self.error.clear()
        self._say("Skipped: what answers the question is shown. You can still guess.")
        self._tell()

    @property
    def settled(self) -> bool:
        """Whether the answer may be shown: the guess was kept or skipped, or nobody is there to make one."""
        return self.guess is not None or self.skipped or under_test() or os.environ.get("LABKIT_KIOSK", "0") != "0"

    def when_settled(self, show: Callable[[], None]) -> None:
        """Call ``show`` as soon as the answer may be shown, and again whenever the guess changes."""
        self._waiting.append(show)
        if self.settled:
            show()

    def _tell(self) -> None:
        for show in self._waiting:
            show()

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


def predict(
    question: str, *, unit: str = "", choices: Sequence[str] = (), key: str = "", low: float | None = 0.0
) -> Guess:
    """Ask before the run: a number with ``unit``, at least ``low``, or one of ``choices``. A cell's last line shows it.

    ``guess.guess`` holds the answer (float, str, or None), ``guess.verdict(actual)`` compares.
    """
    if choices and len(choices) < 2:
        raise ValueError("a question with choices needs at least two of them.")
    return Guess(question, unit=unit, choices=choices, key=key, low=low)


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
