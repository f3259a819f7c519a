"""Which strings of a source file a reader sees: its sentences and labels, found by reading the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

WORDS = re.compile(r"[A-Za-z][a-z]+(?:[ ,:;]+[A-Za-z0-9{(“*`][\w{}.:]*)")
"""Two words or more, one after the other: a sentence or a label, no name of a column, a style or an option."""
SAYING = {"say", "counted"}
"""Calls whose literals are sentences, however short."""


def readable(text: str) -> str:
    """The text without what is code: `code` in backticks, HTML's tags and names for symbols."""
    return re.sub(r"`[^`]*`|<[^<>]*>|&\w+;", " ", text)


def is_prose(text: str) -> bool:
    """Whether a reader would read it as words. HTML counts by what stands between its tags.

    >>> is_prose("Time per token"), is_prose("lk-row"), is_prose('<div class="lk-row">'), is_prose("`min(a, b)`")
    (True, False, False, False)
    """
    return bool(WORDS.search(readable(text)))


def sentences_of(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """(line, text, is a whole string) of what a reader sees. Docstrings and messages of ``raise`` are left out: these
    say what went wrong in the library's own words. An f-string comes as text with {} in it, and is not whole."""
    for node, parents in _walk(tree, ()):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if not _is_hidden(node, parents) and (is_prose(node.value) or _is_said(node, parents)):
                yield node.lineno, node.value, True
        elif isinstance(node, ast.JoinedStr) and not _is_hidden(node, parents):
            text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            if is_prose(text):
                yield node.lineno, text, False


def strings_of(path: Path) -> set[str]:
    """Every whole string of a file, whatever it is for."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _walk(node: ast.AST, parents: tuple[ast.AST, ...]) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    yield node, parents
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, (*parents, node))


def _is_hidden(node: ast.AST, parents: tuple[ast.AST, ...]) -> bool:
    if isinstance(parents[-1], ast.Expr | ast.JoinedStr | ast.FormattedValue):
        return not _inside_saying(parents)  # a docstring, or a piece of an f-string
    return any(isinstance(parent, ast.Raise | ast.Assert) for parent in parents) and not _inside_saying(parents)


def _is_said(node: ast.AST, parents: tuple[ast.AST, ...]) -> bool:
    call = parents[-1]
    return isinstance(call, ast.Call) and node in call.args and _name(call) in SAYING


def _inside_saying(parents: tuple[ast.AST, ...]) -> bool:
    return any(isinstance(parent, ast.Call) and _name(parent) in SAYING for parent in parents)


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
