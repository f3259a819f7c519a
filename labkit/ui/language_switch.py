"""The reader's choice of a language: one menu at the top of a lesson, kept for the pages to come."""

from __future__ import annotations

import ipywidgets as w

from labkit.ui import controls, html
from labkit.ui.errors import ErrorBox, guarded
from labkit.ui.words import choose, language, languages, say


class LanguageSwitch(w.VBox):
    """A menu of languages, each in its own words. What is on the page already stays as it is; the note says so."""

    def __init__(self) -> None:
        entries = [(name, code) for code, name in languages().items()]
        self.field = controls.choice("Language · 语言", entries, language(), width="190px")
        self.note, self.error = w.HTML(), ErrorBox()
        self.field.observe_value(guarded(self.error, self._chosen))
        super().__init__([controls.stack(self.field, self.note, self.error, panel=True)])

    def _chosen(self) -> None:
        self.error.clear()
        choose(self.field.value, keep=True)
        words = say("Pages speak English from now on. This one does when you run its cells again, from the top.")
        self.note.value = f'<div class="lk-help" role="status" lang="{language()}">{html.prose(words)}</div>'
