"""Words of a figure in lines short enough for a phone: plotly breaks no line by itself and cuts off what is too long.

The page's width is known to the page alone, so names and titles are broken for the narrowest one, 320 px.
"""

from __future__ import annotations

import textwrap
from typing import Any

LEGEND, TITLE, UPRIGHT, CATEGORY = 26, 28, 34, 18
"""Characters a line: a legend's entry, a horizontal axis's title or an annotation, an upright title, a tick's words."""
BESIDE = 22
"""A horizontal axis's title when words stand at the other axis and take half of the width."""


def wrapped(words: str, width: int) -> str:
    """``words`` in lines of at most ``width`` characters where that can be; no word is cut, none lost.

    >>> wrapped("per cent of what is allowed", 15)
    'per cent of<br>what is allowed'
    """
    lines = words.split("<br>")
    made = [part for line in lines for part in textwrap.wrap(line, width, break_long_words=False) or [""]]
    return "<br>".join(made)


def fit(spec: dict[str, Any]) -> dict[str, Any]:
    """A figure's JSON with its legend, titles, annotations and bars' names broken into lines; changed in place."""
    layout = spec.get("layout", {})
    has_words = False
    for trace in spec.get("data", []):
        if isinstance(trace.get("name"), str):
            trace["name"] = wrapped(trace["name"], LEGEND)
        if trace.get("orientation") == "h" and isinstance(trace.get("y"), list):
            has_words = has_words or any(isinstance(y, str) for y in trace["y"])
            trace["y"] = [wrapped(y, CATEGORY) if isinstance(y, str) else y for y in trace["y"]]
    for name, axis in layout.items():
        title = axis.get("title") if isinstance(axis, dict) and name.startswith(("xaxis", "yaxis")) else None
        if isinstance(title, dict) and title.get("text"):
            across = BESIDE if has_words else TITLE
            title["text"] = wrapped(title["text"], across if name.startswith("xaxis") else UPRIGHT)
    for note in layout.get("annotations", []):
        note["text"] = wrapped(note.get("text", ""), TITLE)
    return spec
