"""Choosing a component: every registered one appears, with its own options, or with why it is not available."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html import escape
from typing import Any

import ipywidgets as w

from labkit import registry
from labkit.ui import controls
from labkit.ui.words import say

NONE = ""
"""The menu's value for "no component": ipywidgets shows nothing at all for a choice whose value is None."""


class ComponentPicker(w.VBox):
    """A dropdown drawn from ``labkit.components(kind)``, the chosen one's summary, and its options below.

    ``none_label`` adds a first entry that means "no component" (value None), which ``none_help`` explains. What cannot
    be chosen on this machine is listed under the dropdown with its reason: a dropdown cannot grey out one entry.
    ``value`` is None, a name, or a config object when the component has options.
    """

    def __init__(
        self,
        kind: str,
        label: str,
        *,
        value: str | None = None,
        none_label: str | None = None,
        none_help: str = "",
        first: tuple[str, str] | None = None,
        width: str = "230px",
    ) -> None:
        self.kind = kind
        self.infos = {info.name: info for info in registry.components(kind)}
        here = [info.name for info in self.infos.values() if info.unavailable is None]
        entries: list[tuple[str, Any]] = [(none_label, NONE)] if none_label else []
        entries += [first] if first else []
        entries += [(name, name) for name in here]
        self.first, self.none_help = first, none_help
        self.field = controls.choice(label, entries or [("none here", NONE)], value, width="100%")
        self.note = w.HTML()
        self.option_row = w.Box([])
        self.option_row.add_class("lk-row")
        self._callbacks: list[Callable[[], Any]] = []
        self._options: dict[str, controls.Field] = {}
        super().__init__([self.field, self.note, self.option_row])
        self.layout.width = width
        self.layout.max_width = "100%"
        self.add_class("lk-field")
        self.field.observe_value(self._chosen)
        self._draw()

    @property
    def name(self) -> str | None:
        return self.field.value or None

    @property
    def value(self) -> Any:
        """What ``Pipeline`` or ``load`` takes: None, a name, or a config with the options as set."""
        if self.name is None or self.name not in self.infos or not self._options:
            return self.name
        _, config = registry.find(self.kind, self.name)
        return replace(config, **{name: field.value for name, field in self._options.items()})

    @property
    def text(self) -> str:
        """The choice in words, options that differ from their default included: "top-k, top_k=5"."""
        if self.name is None:
            return str(self.field.control.options[0][0])
        changed = (
            [
                f"{option.name}={self._options[option.name].value:g}"
                if isinstance(option.default, float)
                else f"{option.name}={self._options[option.name].value}"
                for option in self.infos[self.name].options
                if self._options[option.name].value != option.default
            ]
            if self.name in self.infos
            else []
        )
        return ", ".join([self.name, *changed])

    def observe_value(self, callback: Callable[[], Any]) -> None:
        self._callbacks.append(callback)

    def set_disabled(self, disabled: bool) -> None:
        for field in (self.field, *self._options.values()):
            field.set_disabled(disabled)

    def reset(self) -> None:
        self.field.reset()
        for field in self._options.values():
            field.reset()

    def _chosen(self) -> None:
        self._draw()
        self._changed()

    def _changed(self) -> None:
        for callback in self._callbacks:
            callback()

    def _draw(self) -> None:
        info = self.infos.get(self.name or "")
        self._options = {option.name: _option_field(option) for option in info.options} if info else {}
        for field in self._options.values():
            field.observe_value(self._changed)
        self.option_row.children = tuple(self._options.values())
        (self.option_row.remove_class if self._options else self.option_row.add_class)("lk-empty")
        summary = say(info.summary if info else self.none_help if self.name is None else "")
        lines = [escape(summary)] if summary else []
        away = [i for i in self.infos.values() if i.unavailable is not None]
        if away:
            many = say("{n} not available here", n=len(away))
            rows = "".join(f"<div><s>{escape(i.name)}</s> {escape(i.unavailable or '')}</div>" for i in away)
            lines.append(f'<details class="lk-away"><summary>{many}</summary>{rows}</details>')
        self.note.value = "".join(f'<div class="lk-help">{line}</div>' for line in lines)


def _option_field(option: registry.Option) -> controls.Field:
    label = option.name.replace("_", " ")
    if option.choices:
        return controls.choice(label, list(option.choices), option.default, width="130px", help=option.help)
    if isinstance(option.default, bool):
        return controls.toggle(label, option.default)
    low = option.low if option.low is not None else 0
    high = option.high if option.high is not None else max(1, 10 * (option.default or 1))
    return controls.slider(label, low, high, option.default, step=option.step, width="200px", help=option.help)
