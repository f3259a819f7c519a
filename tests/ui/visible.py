"""What a widget shows, as text: what a reader sees, and what a screen reader says."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

import ipywidgets as w

from labkit.ui.phase_bars import PhaseBars
from labkit.ui.status import StatusLine

CODE = re.compile(r"<(code|pre|style)\b.*?</\1>", flags=re.S)
READ_OUT = re.compile(r'(?:aria-label|title)="([^"]*)"')


def of_html(body: str) -> Iterator[str]:
    """What stands between the tags, and the attributes that are read out; code and styles are left out."""
    body = CODE.sub(" ", body)
    yield from READ_OUT.findall(body)
    yield from filter(str.strip, (html.unescape(part) for part in re.split(r"<[^<>]*>", body)))


def of_figure(spec: Any) -> Iterator[str]:
    """A plotly figure's names, titles and notes."""
    if isinstance(spec, dict):
        for key, value in spec.items():
            if key in ("text", "name") and isinstance(value, str):
                yield from of_html(value)
            else:
                yield from of_figure(value)
    elif isinstance(spec, list):
        for each in spec:
            yield from of_figure(each)


def of_bars(state: dict[str, Any]) -> Iterator[str]:
    for tile in state.get("tiles", ()):
        yield from (tile["label"], tile["unit"], tile["note"])
    for stage in state["stages"]:
        yield from (stage["name"], stage["note"], stage["summary"])
        for segment in stage["segments"]:
            yield from (segment["label"], segment["title"])
    yield from (item["label"] for item in state["legend"])


def of_widget(widget: Any) -> Iterator[str]:
    """Every text of a widget and of what is in it; not the model's own words, nor what the reader typed."""
    for child in getattr(widget, "children", ()):
        yield from of_widget(child)
    if isinstance(widget, PhaseBars):
        yield widget.text_label
        yield from of_bars(widget.state)
    elif isinstance(widget, StatusLine):
        yield widget.text
        yield from (text for name, text in widget.words.items() if name != "language")
    elif isinstance(widget, w.Output):
        for output in widget.outputs:
            yield from of_figure(output["data"].get("application/vnd.plotly.v1+json"))
    elif isinstance(widget, w.HTML):
        yield from of_html(widget.value)
    elif hasattr(widget, "description"):
        yield from (widget.description, getattr(widget, "placeholder", ""), getattr(widget, "tooltip", "") or "")
        yield from (str(label) for label in getattr(widget, "_options_labels", ()))
