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
from labkit.ui.words import say

WAITING = "The answer waits for your guess above: **Keep my guess**, or **Skip**."


class Guess:
    """One question and the reader's answer. ``guess`` is None until they answer, and when they skip.

    ``low``: the least number that makes sense as an answer (None: any)."""

    def __init__(
        self, question: str, *, unit: str = "", choices: Sequence[str] = (), key: str = "", low: float | None = 0.0
    ) -> None:
        self.question, self.unit, self.key, self.low = question, say(unit), key, low
        self.guess: Any = None
        self.skipped = False
        self._waiting: list[Callable[[], None]] = []
        self.error = ErrorBox()
        self.note = w.HTML()
        if choices:
            self.input: Any = w.RadioButtons(
                options=[(say(each), each) for each in choices], value=None, layout={"width": "auto"}
            )
        else:
            self.input = w.Text(placeholder=say("a number"), layout={"width": "140px"})
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # the only event that Enter alone sends
                self.input.on_submit(lambda _: guarded(self.error, self._keep)())
        field = w.VBox([self.input])
        field.add_class("lk-field")
        self.keep_button = controls.button("Keep my guess", guarded(self.error, self._keep), primary=True)
        self.skip_button = controls.button("Skip", guarded(self.error, self._skip))
        suffix = [w.HTML(f'<span class="lk-muted">{escape(self.unit)}</span>')] if unit and not choices else []
        head = w.HTML(
            f'<div class="lk-eyebrow">{say("Predict")}</div><div class="lk-title">{html.prose(say(question))}</div>'
        )
        buttons = [self.keep_button, self.skip_button]
        lines = [field, controls.row(*buttons)] if choices else [controls.row(field, *suffix, *buttons, middle=True)]
        self.widget = controls.stack(head, *lines, self.error, self.note, panel=True)

    def _keep(self) -> None:
        value = self.input.value
        if isinstance(self.input, w.Text):
            value = as_number(value)
        if value is None:
            raise ValueError(say("there is no guess yet: choose or type one, or press Skip."))
        if isinstance(value, float) and self.low is not None and value < self.low:
            wrong = {"guess": html.number(value), "low": html.number(self.low)}
            raise ValueError(say("{guess} cannot be: the answer is {low} or more.", **wrong))
        self.guess, self.skipped = value, False
        self.error.clear()
        self._say(say("Kept: <b>{guess}</b>. Now run it.", guess=escape(self.text)))
        self._tell()

    def _skip(self) -> None:
        self.guess, self.skipped = None, True
        self.error.clear()
        self._say(say("Skipped: what answers the question is shown. You can still guess."))
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
            return say("no guess")
        return f"{html.number(self.guess)} {self.unit}".strip() if isinstance(self.guess, float) else say(self.guess)

    def verdict(self, actual: float | str) -> str:
        """The guess beside what was measured, in one sentence.

        >>> guess = Guess("How fast?", unit="tok/s"); guess.guess = 30.0
        >>> guess.verdict(60.0)
        'You guessed 30.0 tok/s; it was 60.0 tok/s: 2.0 times as much.'
        """
        unit = f" {self.unit}" if self.unit else ""
        if self.guess is None:
            if isinstance(actual, str):
                return say("It was “{answer}”.", answer=say(actual))
            return say("It was {figure}.", figure=f"{html.number(actual)}{unit}")
        if isinstance(actual, str) or isinstance(self.guess, str):
            if self.guess == actual:
                return say("You guessed it.")
            both = {"guess": say(str(self.guess)), "answer": say(str(actual))}
            return say("You guessed “{guess}”; it was “{answer}”.", **both)
        found = {"guess": f"{html.number(self.guess)}{unit}", "figure": f"{html.number(float(actual))}{unit}"}
        if self.guess <= 0 or actual <= 0:
            return say("You guessed {guess}; it was {figure}.", **found)
        ratio = actual / self.guess
        if math.isclose(ratio, 1, abs_tol=0.1):
            return say("You guessed {guess}; it was {figure}: well judged.", **found)
        if ratio > 1:
            return say("You guessed {guess}; it was {figure}: {ratio:.1f} times as much.", ratio=ratio, **found)
        return say("You guessed {guess}; it was {figure}: {ratio:.1f} times less.", ratio=1 / ratio, **found)

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
        raise ValueError(say("{text} is not a number: type figures only, such as 12.5.", text=repr(text)))
    return value
