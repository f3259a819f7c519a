"""The other side of ``apart``: reads requests, runs templates and patterns, answers. Started as a program, never here.

It keeps no state but what it has compiled, opens no files, and on Linux cannot grow beyond its bound.
"""

from __future__ import annotations

import json
import os
import re
import sys
from functools import lru_cache
from typing import Any

from labkit.tokenizer import chat_program
from labkit.tokenizer.apart import MAX_MEMORY_BYTES

MAX_CPU_S = 60
"""Beyond any request's bound: for the case that whoever watches has ended."""


def main() -> None:
    """Answer one line of JSON for each line of JSON, until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever prints does not answer
    chat_program.warm_up()
    _bound()
    print("{}", file=answers, flush=True)
    for line in sys.stdin.buffer:
        _more_time()
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": DOES[request.pop("do")](**request)}
    except Exception as error:  # noqa: BLE001 - whatever a stranger's program raises is its answer
        return {"error": str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"}


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(str(error) or type(error).__name__) from error


def _compile(pattern: str) -> None:
    _compiled(pattern)


def _spans(pattern: str, text: str) -> list[int]:
    """Where the pattern matches: start and end of each match, one after the other."""
    return [place for match in _compiled(pattern).finditer(text) for place in match.span()]


DOES = {"render": chat_program.run, "compile": _compile, "spans": _spans}


def _bound() -> None:
    """Limits of the system's own: memory, files, and no image of a process that dies."""
    try:
        import resource
    except ImportError:  # Windows: whoever started this watches
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as statm:
            held = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MAX_MEMORY_BYTES, held + MAX_MEMORY_BYTES))


def _more_time() -> None:
    try:
        import resource
    except ImportError:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + MAX_CPU_S, hard))
