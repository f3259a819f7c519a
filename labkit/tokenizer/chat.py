"""Chat templates: from a list of messages to the one string that the model was trained on.

A template is a Jinja program that arrives inside the model file, so it is a stranger's code. It runs in Jinja's
*immutable sandbox*: no attribute that starts with an underscore, no changing of the caller's objects, no files, no
imports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

Message = Mapping[str, Any]


def render(template: str, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
    """`messages` laid out by a Jinja chat template. Raises ValueError when the template or a message is malformed.

    >>> render("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", [{"role": "user", "content": "A"}])
    '<user>A'
    """
    import jinja2

    if isinstance(messages, (str, Mapping)) or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(
            'messages must be a list of dicts such as [{"role": "user", "content": "Hello"}], '
            f"not {type(messages).__name__}"
        )
    for i, message in enumerate(messages):
        if "role" not in message:
            raise ValueError(f"message {i} has no role: {dict(message)!r}; give it one of system, user, assistant")
    try:
        return compiled(template).render(
            messages=list(messages), add_generation_prompt=add_generation_prompt, **variables
        )
    except jinja2.exceptions.SecurityError as error:
        raise ValueError(f"the chat template tried something the sandbox forbids: {error}") from error
    except jinja2.exceptions.TemplateError as error:
        raise ValueError(f"the chat template could not lay out these messages: {error}") from error


@lru_cache(maxsize=8)
def compiled(template: str) -> Any:
    """The template as a program in the sandbox, kept. Raises ValueError when it is malformed."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks what the assistant wrote, for training; when prompting, its body is all that
        counts."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    try:
        return environment.from_string(template)
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid Jinja (line {error.lineno}): {error.message}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)  # no HTML escaping: this is a prompt


def _raise(message: str) -> NoReturn:
    import jinja2

    raise jinja2.exceptions.TemplateError(message)
