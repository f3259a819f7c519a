"""What answers a question, kept covered until the reader has guessed or skipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as w

from labkit.ui import html
from labkit.ui.predict import WAITING, Guess
from labkit.ui.words import say


class Reveal(w.VBox):
    """``make()`` gives the widgets to show; it is asked when the guess is settled, and again when it changes."""

    def __init__(self, guess: Guess, make: Callable[[], Sequence[Any]]) -> None:
        super().__init__([w.HTML(html.page(f'<div class="lk-note" role="status">{html.prose(say(WAITING))}</div>'))])
        self.add_class("lk-reveal")
        self._make = make
        guess.when_settled(self._show)

    def _show(self) -> None:
        self.children = tuple(self._make())


def covered(guess: Guess, body: Callable[[], str]) -> Reveal:
    """HTML of ours (``body``, made when it may be shown) that waits for ``guess``."""
    return Reveal(guess, lambda: [w.HTML(html.page(body()))])


def verdict(guess: Guess, actual: float | str | None, *sentences: str) -> Reveal:
    """The guess beside what came out, and what else the run has to say (`code` and **bold** work).

    ``actual`` None: the run has no answer to the question; the sentences then say why.
    """

    def words() -> str:
        said = [*([] if actual is None else [guess.verdict(actual)]), *filter(None, sentences)]
        return "".join(f'<div class="lk-note">{html.prose(sentence)}</div>' for sentence in said)

    return covered(guess, words)
