"""A picture that answers its controls at once: nothing is timed, so there is no Run button and nothing to wait for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as w

from labkit.ui import controls, html
from labkit.ui.errors import ErrorBox, guarded
from labkit.ui.experiment import Result, figure_output
from labkit.ui.words import say


class Live:
    """``draw(**values)`` gets the controls' values by name and returns a ``Result`` fast enough to follow a slider:
    its ``extra`` (HTML of ours, texts in it escaped) or its ``figure``, one sentence, and the rows of its table twin.

    It is drawn once when it is made, and again at each change. Raises ValueError for more than four controls.
    """

    def __init__(self, title: str, draw: Callable[..., Result], fields: Mapping[str, Any], *, note: str = "") -> None:
        if len(fields) > 4:
            raise ValueError(f"{len(fields)} controls: at most 4, one question a picture.")
        self.fields, self._make = dict(fields), draw
        self.result: Result | None = None
        self.error, self.picture, self.figure, self.below = ErrorBox(), w.HTML(), w.Output(), w.HTML()
        self.figure.add_class("lk-figure")
        for field in self.fields.values():
            if isinstance(field.control, w.IntSlider | w.FloatSlider):
                field.control.continuous_update = True
            field.observe_value(guarded(self.error, self.draw))
        sub = f'<div class="lk-sub">{html.prose(say(note))}</div>' if note else ""
        head = (
            f'<div class="lk-eyebrow">{say("Picture")} · {say("it follows the controls, nothing is timed")}</div>'
            f'<div class="lk-title">{html.prose(say(title))}</div>{sub}'
        )
        self.widget = controls.stack(
            w.HTML(head),
            controls.row(*self.fields.values()),
            self.error,
            self.picture,
            self.figure,
            self.below,
            panel=True,
        )
        guarded(self.error, self.draw)()

    def draw(self) -> None:
        """The picture for the controls as they stand."""
        result = self._make(**{name: field.value for name, field in self.fields.items()})
        self.error.clear()
        self.result = result
        self.picture.value = result.extra
        self.figure.layout.display = "none" if result.figure is None else None
        if result.figure is not None:
            self.figure.layout.min_height = f"{result.figure.layout.height or 450}px"  # as in Experiment
            self.figure.outputs = (figure_output(result.figure, result.summary),)
        table = html.table(result.rows, result.caption)
        self.below.value = (
            f'<div role="status">{html.prose(result.summary)}</div>'
            f'<details class="lk-twin"><summary>{say("The figure as a table")}</summary>{table}</details>'
        )

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.widget)
