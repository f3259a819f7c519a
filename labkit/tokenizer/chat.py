"""Chat templates: from a list of messages to the one string that the model was trained on.

A template is a Jinja program that arrives inside the model file, so it is a stranger's code. It runs in Jinja's sandbox
(``chat_program``), and in a process of its own (``apart``), bounded in time, memory and output: Jinja's compiler
computes constants, so that even compiling one may never end. Nothing of it is looked at before somebody chats. The
default model's template is known, and runs here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.tokenizer import apart, chat_program

Message = Mapping[str, Any]

KNOWN = frozenset(("872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",))
"""SHA-256 of templates that were read: the default model's."""


def render(template: str, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
    """`messages` laid out by a Jinja chat template.

    Raises ValueError when the template or a message is malformed, with the template's line, and when the template
    passes one of its bounds. `variables` must be what JSON can say.

    >>> render("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", [{"role": "user", "content": "A"}])
    '<user>A'
    """
    if isinstance(messages, (str, Mapping)) or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(
            'messages must be a list of dicts such as [{"role": "user", "content": "Hello"}], '
            f"not {type(messages).__name__}"
        )
    for i, message in enumerate(messages):
        if "role" not in message:
            raise ValueError(f"message {i} has no role: {dict(message)!r}; give it one of system, user, assistant")
    given = {"messages": [dict(message) for message in messages], "add_generation_prompt": add_generation_prompt}
    given |= variables
    if is_known(template):
        return chat_program.run(template, given)
    try:
        json.dumps(given)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"messages and template variables must be what JSON can say: {error}") from error
    return apart.ask({"do": "render", "template": template, "variables": given}, what="the chat template")


def is_known(template: str) -> bool:
    """Whether this template may run in this process."""
    return hashlib.sha256(template.encode("utf-8", "surrogatepass")).hexdigest() in KNOWN


def prepare(template: str) -> None:
    """Have what the first chat needs: a known template compiled, a process for any other. Runs no stranger's code."""
    if is_known(template):
        chat_program.compiled(template)
    else:
        apart.begin()
