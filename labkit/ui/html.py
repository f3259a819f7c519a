"""Small pieces of HTML, every text escaped: what a model wrote is shown, never interpreted."""

from __future__ import annotations

import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from IPython.display import HTML, display

from labkit.ui.theme import css
from labkit.ui.words import language, say

LONG = 40
"""Characters from which a column of text is kept wide enough to read."""


def show(body: str) -> None:
    """Display ``body`` (trusted HTML of ours) with labkit's style."""
    display(HTML(page(body)))


def page(body: str, *, classes: str = "") -> str:
    return f'{css()}<div class="labkit {classes}" lang="{language()}">{body}</div>'


def prose(text: str) -> str:
    """Plain text to HTML: escaped, with `code` and **bold** honoured.

    >>> prose("use `top_k` <1>")
    'use <code>top_k</code> &lt;1&gt;'
    """
    safe = escape(text, quote=False)
    safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", safe)
    return re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", safe)


def number(value: Any) -> str:
    """A figure as a reader wants it: three significant digits, thousands apart, never 1e+05.

    >>> number(0.01234), number(12.34), number(1234567), number(None), number("fp32")
    ('0.0123', '12.3', '1,234,567', '–', 'fp32')
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return say("yes") if value else say("no")
    if isinstance(value, numbers.Integral):
        return f"{int(value):,}"
    if not isinstance(value, numbers.Real):
        return str(value)
    value = float(value)
    if value != value:
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    if abs(value) >= 1:
        return f"{value:.2f}"
    return f"{value:.3g}"


def size(n_bytes: float | None) -> str:
    """Bytes for people, in powers of 1000.

    >>> size(269_100_000), size(4_915_200), size(0)
    ('269 MB', '4.92 MB', '0 B')
    """
    if n_bytes is None:
        return "–"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            return f"{number(n_bytes / scale)} {unit}"
    return f"{n_bytes:.0f} B"


def table(
    rows: Any, caption: str = "", *, row_header: bool = True, differing: Mapping[int, Iterable[str]] | None = None
) -> str:
    """An accessible table: caption, column headers, row headers, figures to the right. Caption and headers say
    themselves in the reader's language; a cell shows what it holds.

    ``rows`` is a list of dicts with the same keys, or a pandas DataFrame. ``differing`` {row: column names}
    marks cells to look at, by weight and colour.
    """
    rows, caption = _as_rows(rows), say(caption)
    if not rows:
        return f'<p class="lk-muted">{prose(caption)} {say("(nothing yet)")}</p>'
    columns = list(dict.fromkeys(key for row in rows for key in row))
    numeric = {c: all(_is_number(row.get(c)) for row in rows) for c in columns}
    long = {c: any(len(str(row.get(c, ""))) > LONG for row in rows) and not numeric[c] for c in columns}
    head = "".join(f'<th scope="col"{_cls(numeric[c])}>{escape(say(str(c)))}</th>' for c in columns)
    body = []
    for idx, row in enumerate(rows):
        marked = set((differing or {}).get(idx, ()))
        cells = []
        for at, column in enumerate(columns):
            text = escape(number(row.get(column)))
            classes = _cls(numeric[column], column in marked, long[column])
            first = at == 0 and row_header
            cells.append(f'<th scope="row"{classes}>{text}</th>' if first else f"<td{classes}>{text}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    title = f"<caption><span>{prose(caption)}</span></caption>" if caption else ""
    return (
        f'<div class="lk-scroll" tabindex="0" role="group" aria-label="{escape(caption or say("table"))}">'
        f'<table class="lk-table">{title}<thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def _as_rows(rows: Any) -> Sequence[Mapping[Any, Any]]:
    if hasattr(rows, "to_dict"):
        return rows.to_dict("records")
    if isinstance(rows, Mapping):
        return [{"": say(str(key)), "value": value} for key, value in rows.items()]
    return list(rows)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, numbers.Real) and not isinstance(value, bool))


def _cls(is_number: bool, is_differing: bool = False, is_long: bool = False) -> str:
    kinds = (("is-number", is_number), ("is-differing", is_differing), ("is-long", is_long))
    names = " ".join(name for name, on in kinds if on)
    return f' class="{names}"' if names else ""
