"""Normalizers: what a ``tokenizer.json`` asks to be done to plain text before it is split."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

Normalizer = Callable[[str], str]


def build(spec: Mapping[str, Any] | None) -> Normalizer | None:
    """The normalizer that a ``tokenizer.json`` section describes; None when there is nothing to do.

    NFC and its kin follow the Unicode version of the running Python, which is the reference's for every character that
    existed in that version. Raises ValueError for a kind that labkit does not know.

    >>> build({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}, {"type": "NFC"}]})("é")
    '_é'
    """
    if spec is None:
        return None
    kind = spec.get("type")
    if kind == "Sequence":
        steps = [step for part in spec["normalizers"] if (step := build(part))]
        return _chain(steps) if steps else None
    if kind in ("NFC", "NFD", "NFKC", "NFKD"):
        return _unicode_form(kind)
    if kind == "Prepend":
        prefix = spec["prepend"]
        return lambda text: prefix + text if text else text
    if kind == "Replace" and "String" in spec["pattern"]:
        old, new = spec["pattern"]["String"], spec["content"]
        return lambda text: text.replace(old, new)
    if kind == "Lowercase":
        return str.lower
    raise ValueError(
        f"the tokenizer file asks for the normalizer {kind!r}, which labkit does not have; running without it would "
        "give wrong token ids, so the file is refused"
    )


def _chain(steps: list[Normalizer]) -> Normalizer:
    def run(text: str) -> str:
        for step in steps:
            text = step(text)
        return text

    return run


def _unicode_form(form: Any) -> Normalizer:
    def normalize(text: str) -> str:
        if text.isascii() or unicodedata.is_normalized(form, text):
            return text
        return unicodedata.normalize(form, text)

    return normalize
