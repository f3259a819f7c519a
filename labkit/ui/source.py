"""Look inside: real lines of labkit, read from its source at this moment, so they never go stale."""

from __future__ import annotations

import importlib
import inspect
import io
import keyword
import tokenize
from html import escape
from pathlib import Path
from typing import Any

from labkit.ui import html
from labkit.ui.words import say

MAX_LINES = 40


def show_source(thing: Any, first: int | str | None = None, last: int | str | None = None) -> None:
    """Show a function's, class's or module's source with line numbers.

    ``thing``: the object, or its dotted name ("labkit.decoding.sampling.keep_top_k"). ``first`` and ``last``
    narrow it: counted lines of the object (1 is its first), or a text that the line contains.
    Raises ValueError when nothing matches, or when more than 40 lines would be shown.
    """
    thing = _resolve(thing) if isinstance(thing, str) else thing
    lines, start = inspect.getsourcelines(thing)
    start = max(start, 1)
    path = Path(inspect.getsourcefile(thing) or "")
    begin = _line(lines, first, 0, 0)
    end = _line(lines, last, begin, len(lines) - 1)
    shown = lines[begin : end + 1]
    if not shown or len(shown) > MAX_LINES:
        raise ValueError(f"{len(shown)} lines: choose 1 to {MAX_LINES} with first= and last=.")
    root = Path(html.__file__).parents[2]
    name = path.relative_to(root) if path.is_relative_to(root) else path.name
    at = start + begin
    marks = _highlight("".join(_dedent(shown))).split("\n")
    body = "\n".join(f'<span class="ln" aria-hidden="true">{at + n}</span>{text}' for n, text in enumerate(marks))
    where = say("{file}, lines {first} to {last}", file=name, first=at, last=at + len(shown) - 1)
    html.show(
        f'<figure class="lk-source" style="margin:0"><figcaption class="lk-source-name">{escape(where)}'
        f'</figcaption><pre tabindex="0"><code>{body}</code></pre></figure>'
    )


def _resolve(name: str) -> Any:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                raise ValueError(f"{'.'.join(parts[:cut])} has no {part!r}: cannot show {name!r}.")
            found = getattr(found, part)
        return found
    raise ValueError(f"cannot find {name!r}: give a dotted name such as 'labkit.pipeline.loop'.")


def _line(lines: list[str], where: int | str | None, begin: int, otherwise: int) -> int:
    if where is None:
        return otherwise
    if isinstance(where, int):
        return min(max(where - 1, 0), len(lines) - 1)
    for at in range(begin, len(lines)):
        if where in lines[at]:
            return at
    raise ValueError(f"no line contains {where!r}.")


def _dedent(lines: list[str]) -> list[str]:
    pad = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return [line[pad:] if line.strip() else "\n" for line in lines]


def _highlight(code: str) -> str:
    """Keywords, strings, comments, numbers and defined names as spans, by Python's own tokenizer."""
    code = code.rstrip("\n")
    out: list[str] = []
    at_line, at_column, after_def = 1, 0, False
    rows = code.split("\n")

    def upto(line: int, column: int) -> None:
        nonlocal at_line, at_column
        while at_line < line:
            out.append(escape(rows[at_line - 1][at_column:]) + "\n")
            at_line, at_column = at_line + 1, 0
        if line <= len(rows):
            out.append(escape(rows[line - 1][at_column:column]))
            at_column = column

    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            kind = _class_of(token, after_def)
            after_def = token.string in ("def", "class")
            if not kind:
                continue
            upto(*token.start)
            pieces = escape(token.string).split("\n")
            out.append("\n".join(f'<span class="{kind}">{piece}</span>' for piece in pieces))
            at_line, at_column = token.end
    except (tokenize.TokenError, IndentationError):
        pass  # an excerpt may end inside a bracket or a block: the rest stays plain
    upto(len(rows), len(rows[-1]))
    return "".join(out)


def _class_of(token: tokenize.TokenInfo, after_def: bool) -> str:
    name = tokenize.tok_name[token.type]
    if token.type == tokenize.NAME:
        return "f" if after_def else "k" if keyword.iskeyword(token.string) else ""
    if name.startswith("FSTRING") or token.type == tokenize.STRING:
        return "s"
    return {tokenize.COMMENT: "c", tokenize.NUMBER: "n"}.get(token.type, "")
