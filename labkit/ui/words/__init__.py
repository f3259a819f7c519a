"""What the pages say, in the reader's language. English stands where it is used; a catalogue gives its translation.

    say("Stopped after {took}.", took="1.2 s")            # English, or what zh-CN.toml has for that sentence
    counted(n, "{n:,} token", "{n:,} tokens")             # one of something, or several
    sentences(first, second)                              # whole sentences, one after the other

The English sentence is the key, figures are filled in by name, and a sentence is never put together from halves:
another language has another order. A catalogue is a TOML file beside this one; a file more is a language more. What is
not in it is said in English. Controls, headings, captions and questions say themselves: they take plain English.

Which language: the page's own (a Chinese lesson's first cell; a Voila page's ``?language=zh-CN``, which is the
visitor's and nobody else's), else LABKIT_LANGUAGE, else what the reader chose last (``settings.json`` in labkit's cache
folder), else English.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from labkit.resources import cache_folder, read_json_object

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).resolve().parent
ENGLISH = "en"
VARIABLE = "LABKIT_LANGUAGE"
SETTINGS = "settings.json"
MAX_SETTINGS_BYTES = 10_000


@dataclass(frozen=True)
class Catalogue:
    """One language: what it calls itself, what stands between two sentences, and each English sentence in it."""

    name: str
    gap: str
    words: Mapping[str, str]


@cache
def catalogue(code: str) -> Catalogue:
    """The language's own, read from its file; English's is empty. Raises FileNotFoundError for a code without one."""
    if code == ENGLISH:
        return Catalogue("English", " ", {})
    table = tomllib.loads((FOLDER / f"{code}.toml").read_text(encoding="utf-8"))
    return Catalogue(table["language"]["name"], table["language"]["gap"], table["words"])


@cache
def languages() -> dict[str, str]:
    """Every language that there is, by its code: what it calls itself.

    >>> languages()
    {'en': 'English', 'zh-CN': '简体中文'}
    """
    codes = [ENGLISH, *sorted(path.stem for path in FOLDER.glob("*.toml"))]
    return {code: catalogue(code).name for code in codes}


class _Page:
    """What this page (this process) has chosen; None until it does. ``is_own``: it is written in that language."""

    language: str | None = None
    is_own = False


def language() -> str:
    """The code of the language in use. Raises ValueError, which lists the known ones, for one that is not known."""
    if _Page.language is not None:
        return _Page.language
    asked = parse_qs(os.environ.get("QUERY_STRING", "")).get("language", [""])[0]  # Voila's, for each page its own
    for code, where in ((asked, "the page's address"), (os.environ.get(VARIABLE, ""), VARIABLE)):
        if code:
            return known(code, where)
    return _kept() or ENGLISH


def choose(code: str | None, *, keep: bool = False) -> None:
    """Use this language on this page from now on (None: what the surroundings say); ``keep`` it: the reader's choice,
    for later pages too.

    Raises ValueError for a language that is not known.
    """
    _Page.language = None if code is None else known(code, "the page")
    _Page.is_own = code is not None and not keep
    _kept.cache_clear()
    if keep and _Page.language is not None:
        path = cache_folder() / SETTINGS
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"language": _Page.language}), encoding="utf-8")


def known(code: str, where: str) -> str:
    """The code as the catalogues spell it ("zh_cn" is zh-CN). Raises ValueError that lists them for any other."""
    for each in languages():
        if each.lower() == code.strip().replace("_", "-").lower():
            return each
    choices = ", ".join(f"{each} ({name})" for each, name in languages().items())
    raise ValueError(f"unknown language {code!r} in {where}: choose one of {choices}.")


def is_fixed() -> bool:
    """Whether it is not for a menu to say: the page is written in one language, the variable says it, or this is a
    Voila page, whose links say it."""
    return _Page.is_own or bool(os.environ.get(VARIABLE)) or "QUERY_STRING" in os.environ


def say(english: str, /, **values: Any) -> str:
    """The sentence in the language in use, with ``values`` filled in by name, as ``str.format`` does.

    Without values nothing is filled in, so a text with braces of its own stays as it is.

    >>> say("{share:.0%} of {stage}", share=0.5, stage="decode")
    '50% of decode'
    """
    words = catalogue(language()).words.get(english, english) if english else ""
    return words.format(**values) if values else words


def counted(n: int, one: str, many: str, **values: Any) -> str:
    """``say`` with ``n`` among the values: ``one`` for exactly one of something, else ``many``.

    >>> counted(1, "{n:,} token", "{n:,} tokens"), counted(2, "{n:,} token", "{n:,} tokens")
    ('1 token', '2 tokens')
    """
    return say(one if n == 1 else many, n=n, **values)


def sentences(*parts: str) -> str:
    """Whole sentences, one after the other, as the language writes them; empty ones are left out."""
    return catalogue(language()).gap.join(filter(None, parts))


@cache
def _kept() -> str | None:
    """The reader's choice of last time, read once; None when there is none, or none that can be read."""
    path = cache_folder() / SETTINGS
    if not path.is_file():
        return None
    try:
        code = read_json_object(path, max_bytes=MAX_SETTINGS_BYTES).get("language")
    except (ValueError, OSError):
        return None
    return code if isinstance(code, str) and code in languages() else None
