"""A chat template as a program in Jinja's *immutable sandbox*: compiled, run, and its errors in words.

No attribute that starts with an underscore, no changing of the caller's objects, no files, no imports. What a sandbox
does not bound (time, memory) is bounded by where this runs: see ``chat`` and ``apart``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from labkit.tokenizer.apart import MAX_MEMORY_BYTES

MAX_CHARS = 8_000_000
"""Longest text that a template may write."""


def run(template: str, variables: Mapping[str, Any]) -> str:
    """The text that `template` writes. Raises ValueError, with the template's line, whatever goes wrong in it."""
    import jinja2

    program = compiled(template)
    pieces, n_chars = [], 0
    try:
        for piece in program.root_render_func(program.new_context(dict(variables))):
            pieces.append(piece)
            n_chars += len(piece)
            if n_chars > MAX_CHARS:
                raise ValueError(f"it writes more than {MAX_CHARS:,} characters")
        return "".join(pieces)
    except jinja2.exceptions.SecurityError as error:
        raise ValueError(f"the chat template tried something the sandbox forbids{_line(error)}: {error}") from error
    except jinja2.exceptions.TemplateError as error:
        raise ValueError(f"the chat template could not lay out these messages{_line(error)}: {error}") from error
    except MemoryError as error:
        raise ValueError(
            f"the chat template wanted more than {MAX_MEMORY_BYTES >> 20} MB of memory{_line(error)}"
        ) from error
    except Exception as error:
        said = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"the chat template failed{_line(error)}: {said}") from error


@lru_cache(maxsize=8)
def compiled(template: str) -> Any:
    """The template as a program in the sandbox, kept. Raises ValueError when it is malformed."""
    import jinja2

    try:
        return _environment().from_string(template)
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid Jinja (line {error.lineno}): {error.message}") from error
    except Exception as error:  # Jinja folds constants, so a division by zero comes here; and Python's own limits
        raise ValueError(f"the chat template is not valid Jinja: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=1)
def _environment() -> Any:
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
    return environment


def warm_up() -> None:
    """Import Jinja and make its environment."""
    _environment()


def _line(error: BaseException) -> str:
    """ " in line N", of the innermost place in a template that the error passed; "" when there is none."""
    line, trace = None, error.__traceback__
    while trace is not None:
        program = trace.tb_frame.f_globals.get("__jinja_template__")
        if program is not None:
            line = program.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return "" if line is None else f" in line {line}"


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)  # no HTML escaping: this is a prompt


def _raise(message: str) -> NoReturn:
    import jinja2

    raise jinja2.exceptions.TemplateError(message)
