"""Three questions at the end; a wrong answer is explained, not only marked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ipywidgets as w

from labkit.ui import controls, html, progress
from labkit.ui.errors import ErrorBox, guarded
from labkit.ui.words import say

N_ITEMS = 3


@dataclass(frozen=True)
class Item:
    """A question; ``answers`` maps each choice to what to say when it is chosen; ``right`` is one of them."""

    question: str
    answers: Mapping[str, str]
    right: str

    def __post_init__(self) -> None:
        if self.right not in self.answers or len(self.answers) < 2:
            raise ValueError(f"{self.question!r}: `right` must be one of at least two answers.")
        if not all(self.answers.values()):
            raise ValueError(f"{self.question!r}: every answer needs its explanation.")


class Quiz:
    """Items one below the other, each with its own Check button. ``score`` counts right answers."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = tuple(items)
        self.given: dict[int, str] = {}
        self.error = ErrorBox()
        self.radios: list[Any] = []
        self.notes: list[Any] = []
        self.check_buttons: list[Any] = []
        blocks = []
        for idx, item in enumerate(self.items):
            radio = w.RadioButtons(
                options=[(say(each), each) for each in item.answers], value=None, layout={"width": "100%"}
            )
            note = w.HTML()
            check = controls.button("Check", guarded(self.error, lambda idx=idx: self._check(idx)))
            head = w.HTML(f"<div><b>{idx + 1}. {html.prose(say(item.question))}</b></div>")
            blocks.append(controls.stack(head, radio, controls.row(check), note))
            self.radios.append(radio)
            self.notes.append(note)
            self.check_buttons.append(check)
        title = w.HTML(f'<div class="lk-eyebrow">{say("Quiz")}</div>')
        self.widget = controls.stack(title, *blocks, self.error, panel=True)

    @property
    def score(self) -> int:
        return sum(self.items[idx].right == text for idx, text in self.given.items())

    def _check(self, idx: int) -> None:
        item, chosen = self.items[idx], self.radios[idx].value
        if chosen is None:
            self.notes[idx].value = f'<div class="lk-muted" role="status">{say("Choose an answer first.")}</div>'
            return
        self.given[idx] = chosen
        right = chosen == item.right
        progress.note(quiz=self.score)
        word, kind = ("Right.", "is-right") if right else ("Not quite.", "is-wrong")
        text = html.prose(_without_mark(say(item.answers[chosen])))
        self.notes[idx].value = f'<div class="lk-note {kind}" role="status"><b>{say(word)}</b> {text}</div>'

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.widget)


def _without_mark(explanation: str) -> str:
    """The explanation without the yes or no that the mark in front of it has said already.

    >>> _without_mark("Yes: all of them."), _without_mark("Nobody knows.")
    ('All of them.', 'Nobody knows.')
    """
    match = re.match(r"(?:Yes|Right|No)[.:,] ?", explanation)
    if match is None:
        return explanation
    rest = explanation[match.end() :]
    return rest[:1].upper() + rest[1:]


def quiz(*items: tuple[str, Mapping[str, str], str]) -> Quiz:
    """Three items, each ``(question, {answer: explanation, ...}, right answer)``. A cell's last line shows it."""
    if len(items) != N_ITEMS:
        raise ValueError(f"a lesson ends with {N_ITEMS} quiz items, got {len(items)}.")
    return Quiz([Item(*item) for item in items])
