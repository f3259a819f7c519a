"""Normalizers: what a ``tokenizer.json`` asks to be done to plain text before it is split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from labkit.tokenizer import letters

Normalizer = Callable[[str], str]

MAX_STEPS = 64
MAX_GROWTH = 32
"""A step may make a text this many times longer (NFKC: 18 at most, by one ligature), and by 64 K characters more."""


def build(spec: Mapping[str, Any] | None) -> Normalizer | None:
    """The normalizer that a ``tokenizer.json`` section describes; None when there is nothing to do.

    Raises ValueError for a kind that labkit does not know, and at the text when steps multiply its length.

    >>> build({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}, {"type": "NFC"}]})("é")
    '_é'
    """
    steps = _steps(spec)
    if len(steps) > MAX_STEPS:
        raise ValueError(f"the tokenizer file asks for {len(steps)} normalizers in a row; at most {MAX_STEPS} are run")
    return _bounded(steps) if steps else None


def _steps(spec: Mapping[str, Any] | None) -> list[Normalizer]:
    if spec is None:
        return []
    kind = spec.get("type")
    if kind == "Sequence":
        return [step for part in spec["normalizers"] for step in _steps(part)]
    if kind in ("NFC", "NFD", "NFKC", "NFKD"):
        return [lambda text: letters.normal_form(kind, text)]
    if kind == "Prepend":
        prefix = _text(spec["prepend"])
        return [lambda text: _room(text, len(prefix)) and prefix + text]
    if kind == "Replace" and "String" in spec["pattern"]:
        old, new = _text(spec["pattern"]["String"]), _text(spec["content"])
        if not old:
            raise ValueError("the tokenizer file replaces an empty string, which stands everywhere: it is damaged")
        return [lambda text: _room(text, text.count(old) * (len(new) - len(old))) and text.replace(old, new)]
    if kind == "Strip":
        left, right = bool(spec.get("strip_left")), bool(spec.get("strip_right"))
        return [lambda text: _strip(text, left=left, right=right)]
    if kind == "Lowercase":
        return [letters.lower]
    raise ValueError(
        f"the tokenizer file asks for the normalizer {kind!r}, which labkit does not have; running without it would "
        "give wrong token ids, so the file is refused"
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a normalizer wants text, not {value!r:.80}")
    return value


def _room(text: str, n_more: int) -> str:
    """``text``, checked before it grows by ``n_more`` characters."""
    _check(len(text), len(text) + n_more)
    return text


def _check(n_before: int, n_after: int) -> None:
    if n_after > MAX_GROWTH * n_before + 65_536:
        raise ValueError(
            f"the tokenizer file's normalizer makes {n_after:,} characters of {n_before:,}; at most {MAX_GROWTH} "
            "times as many are accepted. No published tokenizer does this: the file is damaged or hostile"
        )


def _bounded(steps: list[Normalizer]) -> Normalizer:
    def run(text: str) -> str:
        n_chars = len(text)
        for step in steps:
            text = step(text)
            _check(n_chars, len(text))
        return text

    return run


def _strip(text: str, *, left: bool, right: bool) -> str:
    from labkit.tokenizer.added import SPACES

    text = text.lstrip(SPACES) if left else text
    return text.rstrip(SPACES) if right else text
