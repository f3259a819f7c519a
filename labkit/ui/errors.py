"""Failures, shown kindly: what happened, what it means, what to do; the traceback folded below."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as w

from labkit.ui.words import say

TITLES = {
    "ValueError": "That setting does not work",
    "TypeError": "That setting does not work",
    "FileNotFoundError": "Something is missing",
    "MemoryError": "Not enough memory",
    "OutOfMemoryError": "Not enough memory on the device",
    "TimeoutError": "That took too long",
    "ConnectionError": "No network",
    "NotImplementedError": "Not there yet",
    "ModuleNotFoundError": "A package is missing",
    "ImportError": "A package is missing",
}
REMEDIES = {
    "MemoryError": "Choose a smaller model, fewer tokens, or narrower weights, and run again.",
    "OutOfMemoryError": "Choose a smaller model, fewer tokens, or narrower weights, and run again.",
    "ModuleNotFoundError": "Run <code>make lab</code> again: it installs what is missing.",
    "ImportError": "Run <code>make lab</code> again: it installs what is missing.",
}


def under_test() -> bool:
    """True where a failure must fail the test instead of only being shown (LABKIT_TEST is set)."""
    return os.environ.get("LABKIT_TEST", "") not in ("", "0")


def under_voila() -> bool:
    """True on a page that others may visit: what is kept there would not be one learner's."""
    return os.environ.get("SERVER_SOFTWARE", "").startswith("voila")


def error_html(error: BaseException) -> str:
    """A friendly box for any exception; its own message stands first, because ours say what to do."""
    kind = type(error).__name__
    message = escape(str(error)) or escape(kind)
    trace = escape("".join(traceback.format_exception(type(error), error, error.__traceback__))[-4000:])
    title = say(TITLES.get(kind, "Something went wrong"))
    remedy = f"<div>{say(REMEDIES[kind])}</div>" if kind in REMEDIES else ""
    return (
        f'<div class="lk-error" role="alert"><b>{title}.</b> {message}{remedy}'
        f"<details><summary>{say('Details for a bug report')}</summary><pre>{trace}</pre></details></div>"
    )


class ErrorBox(w.HTML):
    """Where a panel shows what went wrong; empty and invisible otherwise."""

    def __init__(self) -> None:
        super().__init__("")
        self.add_class("lk-empty")

    def show(self, error: BaseException) -> None:
        self.value = error_html(error)
        self.remove_class("lk-empty")

    def clear(self) -> None:
        self.value = ""
        self.add_class("lk-empty")


def guarded(box: ErrorBox, callback: Callable[..., Any]) -> Callable[..., Any]:
    """A widget callback whose failure is seen: shown in ``box``, and raised again under test."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return callback(*args, **kwargs)
        except Exception as error:
            box.show(error)
            if under_test():
                raise
            return None

    return call
