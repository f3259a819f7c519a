"""When requests come: one after the other at a fixed rate, by chance, in bursts, or as somebody recorded them.

>>> [ask.at_s for ask in Fixed(per_s=2.0).over([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}])]
[0.0, 0.5, 1.0]
"""

from __future__ import annotations

import csv
import io
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ask:
    """A request that comes ``at_s`` seconds after the first: ``options`` are what ``Service.submit`` takes."""

    at_s: float
    options: Mapping[str, Any] = field(default_factory=dict)


class Arrivals:
    """A way to come. ``times`` yields seconds since the beginning, never falling."""

    def times(self) -> Iterator[float]:
        raise NotImplementedError

    def over(self, requests: Sequence[Mapping[str, Any]]) -> list[Ask]:
        """Each of ``requests`` with the time at which it comes."""
        return [Ask(at_s, options) for at_s, options in zip(self.times(), requests, strict=False)]


@dataclass(frozen=True)
class Fixed(Arrivals):
    """One every 1/per_s seconds."""

    per_s: float

    def times(self) -> Iterator[float]:
        _check_rate(self.per_s)
        n = 0
        while True:
            yield n / self.per_s
            n += 1


@dataclass(frozen=True)
class Poisson(Arrivals):
    """Independent of each other, ``per_s`` on average: exponential times between them."""

    per_s: float
    seed: int = 0

    def times(self) -> Iterator[float]:
        _check_rate(self.per_s)
        chance, at = random.Random(self.seed), 0.0
        while True:
            yield at
            at += chance.expovariate(self.per_s)


@dataclass(frozen=True)
class Bursts(Arrivals):
    """``size`` at once, every ``every_s`` seconds."""

    size: int
    every_s: float

    def times(self) -> Iterator[float]:
        if self.size < 1 or self.every_s < 0:
            raise ValueError(f"size={self.size} and every_s={self.every_s}: at least 1, and 0 or more.")
        n = 0
        while True:
            yield n // self.size * self.every_s
            n += 1


def read_recorded(path: str | Path) -> list[Ask]:
    """A recorded trace: JSON (a list of objects) or CSV (with a header). Each row has ``at_s`` and either ``prompt``
    or ``n_prompt_tokens``, and may have ``max_new_tokens``, ``priority``, ``user`` and ``seed``.

    A row without a text is given one token, 1, as many times over: lengths are all that such a recording keeps.
    Raises ValueError that names the row which is not so."""
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    rows: Any = json.loads(text) if path.suffix == ".json" else list(csv.DictReader(io.StringIO(text)))
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path.name} holds no rows: a list of requests is expected.")
    asks = [_ask_of(row, f"{path.name}, row {n}") for n, row in enumerate(rows, 1)]
    return sorted(asks, key=lambda ask: ask.at_s)


def _ask_of(row: Any, where: str) -> Ask:
    whole = {"max_new_tokens", "priority", "seed"}
    try:
        at_s = float(row["at_s"])
        options: dict[str, Any] = {name: int(row[name]) for name in whole if row.get(name) not in (None, "")}
        if row.get("prompt"):
            options["prompt"] = str(row["prompt"])
        else:
            options["prompt"] = [1] * int(row["n_prompt_tokens"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        wanted = "at_s and prompt or n_prompt_tokens are needed, as numbers and text"
        raise ValueError(f"{where}: {wanted}: {error!r}.") from error
    if not 0 <= at_s < float("inf"):
        raise ValueError(f"{where}: at_s={at_s} must be 0 or more.")
    if row.get("user"):
        options["user"] = str(row["user"])
    return Ask(at_s, options)


def play(asks: Sequence[Ask], submit: Callable[..., Any], stop: threading.Event | None = None) -> list[Any]:
    """Submit each request when its time comes; what ``submit`` returned or, if it refused, the exception. Returns early
    when ``stop`` is set."""
    stop = stop or threading.Event()
    began, answers = time.perf_counter(), []
    for ask in asks:
        if stop.wait(max(0.0, began + ask.at_s - time.perf_counter())):
            break
        try:
            answers.append(submit(**ask.options))
        except Exception as error:  # noqa: BLE001 - a refusal is one of the results
            answers.append(error)
    return answers


def _check_rate(per_s: float) -> None:
    if not 0 < per_s < float("inf"):
        raise ValueError(f"per_s={per_s}: must be above 0.")
