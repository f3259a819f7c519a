"""Controls that look alike: a caption above, an ipywidget below. ``.value`` is what the reader chose.

Captions, buttons, menus and help come in English and say themselves in the reader's language (``labkit.ui.words``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as w

from labkit.ui import html
from labkit.ui.words import say


class Field(w.VBox):
    """A control with its caption above and an optional line of help below. ``value`` is the control's.

    The caption is the control's own description, so that it is its label for assistive technology too.
    """

    def __init__(self, label: str, control: Any, *, help: str = "", width: str = "190px") -> None:
        self.label, self.control = say(label), control
        control.description = self.label
        control.style.description_width = "100%"
        control.layout.width = "100%"
        super().__init__([control, *([w.HTML(f'<div class="lk-help">{html.prose(say(help))}</div>')] if help else [])])
        self.layout.width = width
        self.layout.max_width = "100%"
        self.add_class("lk-field")

    @property
    def value(self) -> Any:
        return self.control.value

    @value.setter
    def value(self, value: Any) -> None:
        self.control.value = value

    def observe_value(self, callback: Callable[[], Any]) -> None:
        """Call ``callback()`` when the reader changes the control."""
        self.control.observe(lambda change: callback(), names="value")

    def set_disabled(self, disabled: bool) -> None:
        self.control.disabled = disabled

    def reset(self) -> None:
        self.control.value = self._default

    def start_from(self, value: Any) -> Field:
        """Remember ``value`` as what Reset goes back to."""
        self._default = value
        return self


def slider(
    label: str,
    low: float,
    high: float,
    value: float,
    *,
    step: float | None = None,
    help: str = "",
    width: str = "240px",
) -> Field:
    """A whole number when all bounds are whole, else a decimal. Reports when the reader lets go, not at every pixel."""
    whole = all(float(x).is_integer() for x in (low, high, value, step if step is not None else 1))
    kind = w.IntSlider if whole else w.FloatSlider
    cast: Any = int if whole else float
    step = cast(step if step is not None else (1 if whole else (high - low) / 50))
    control = kind(value=cast(value), min=cast(low), max=cast(high), step=step, continuous_update=False)
    return Field(label, control, help=help, width=width).start_from(control.value)


def number(label: str, value: float, *, low: float, high: float, help: str = "", width: str = "130px") -> Field:
    """A box to type a figure into, kept within its bounds."""
    kind = w.BoundedIntText if isinstance(value, int) else w.BoundedFloatText
    return Field(label, kind(value=value, min=low, max=high), help=help, width=width).start_from(value)


def choice(label: str, options: Sequence[Any], value: Any = None, *, help: str = "", width: str = "190px") -> Field:
    """One of several: values, or (text, value) pairs."""
    pairs = [option if isinstance(option, tuple) else (str(option), option) for option in options]
    control = w.Dropdown(options=[(say(words), each) for words, each in pairs])
    if value is not None:
        control.value = value
    return Field(label, control, help=help, width=width).start_from(control.value)


def toggle(label: str, value: bool = False, *, on: str = "on", off: str = "off", width: str = "150px") -> Field:
    """Two states, as words."""
    return choice(label, [(on, True), (off, False)], value, width=width)


def text(label: str, value: str = "", *, rows: int = 3, placeholder: str = "", width: str = "100%") -> Field:
    """The reader's own words. What they type stays as it is: it is never interpreted."""
    shared: Any = {"value": value, "placeholder": say(placeholder), "continuous_update": False}
    control = w.Textarea(rows=rows, **shared) if rows > 1 else w.Text(**shared)
    return Field(label, control, width=width).start_from(value)


def row(*children: Any, middle: bool = False) -> w.Box:
    """Side by side, wrapping on a narrow page; ``middle`` centres them on one line, for buttons."""
    box = w.Box(list(children))
    box.add_class("lk-row")
    if middle:
        box.add_class("lk-middle")
    return box


def grid(*children: Any) -> w.Box:
    """In columns of equal width, as many as fit."""
    box = w.Box(list(children))
    box.add_class("lk-grid")
    return box


def stack(*children: Any, panel: bool = False) -> w.Box:
    """One below the other; ``panel`` draws the frame and brings the style sheet."""
    from labkit.ui.theme import css

    style = [w.HTML(css())] if panel else []
    if panel:
        style[0].layout.display = "none"
    box = w.Box([*style, *children])
    box.add_class("lk-stack")
    if panel:
        box.add_class("labkit")
        box.add_class("lk-panel")
    return box


def button(words: str, on_click: Callable[[], Any], *, primary: bool = False, tooltip: str = "") -> w.Button:
    """A button with words on it."""
    made = w.Button(description=say(words), tooltip=say(tooltip or words))
    if primary:
        made.add_class("lk-primary")
    made.on_click(lambda _: on_click())
    return made
