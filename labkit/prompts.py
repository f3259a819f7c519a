"""The ready-made prompts that the panels and the lessons offer (``data/prompts/prompts.toml``)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache

from labkit.resources import data_path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class ReadyPrompt:
    """A prompt to choose instead of typing one."""

    name: str
    title: str
    text: str
    chat: bool
    """Whether it is a question to an assistant (chat template) or a text to be continued."""
    shows: str
    """What to watch while it runs, in one sentence."""


@cache
def ready_prompts() -> tuple[ReadyPrompt, ...]:
    """All of them, in the order a menu lists them. Raises ValueError when the file holds something else.

    >>> ready_prompts()[0].name
    'first'
    """
    table = tomllib.loads(data_path("prompts", "prompts.toml").read_text(encoding="utf-8"))
    try:
        return tuple(ReadyPrompt(**{**entry, "text": entry["text"].strip("\n")}) for entry in table["prompt"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"data/prompts/prompts.toml is not a list of prompts: {error}") from error


def ready_prompt(name: str) -> ReadyPrompt:
    """The one called ``name``. Raises ValueError that lists the names."""
    for prompt in ready_prompts():
        if prompt.name == name:
            return prompt
    raise ValueError(f"unknown ready-made prompt {name!r}: choose one of {', '.join(p.name for p in ready_prompts())}.")
