"""Runs that were recorded: what a page shows, and says so, until the reader's own run takes their place.

``data/recorded/<name>.json`` says which processor, which day and how busy it was, then holds what the panel draws
from. ``python benchmarks/recorded.py`` makes them, by real runs of the panels themselves; nobody writes one by hand.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from labkit.perf.machine import BUSY_SHARE
from labkit.perf.trace import Trace
from labkit.resources import data_path, read_json_object
from labkit.run import Completion
from labkit.ui import html
from labkit.ui.machine import this_machine
from labkit.ui.words import counted, say, sentences

FORMAT = "labkit-recorded-run-1"
MAX_BYTES = 1_000_000
DIGITS = 7
"""Seconds are kept to a tenth of a microsecond."""


@dataclass(frozen=True)
class Recording:
    """One run of a panel on some machine, and when. ``data`` is what the panel draws from."""

    processor: str
    n_cores: int
    """How many of them the run could use."""
    date: str
    busy_share: float
    """The share of those cores that other programs took meanwhile, 0 to 1."""
    data: dict[str, Any]

    def words(self) -> str:
        """Where and when, and that it is not the reader's own."""
        cores = counted(self.n_cores, "{n} core", "{n} cores")
        where = say(
            "**Recorded** on {processor}, {cores}, {date}: not a run on this machine. Press Run, and yours takes "
            "its place.",
            processor=self.processor,
            cores=cores,
            date=self.date,
        )
        rough = "Other programs took {share:.0%} of its cores meanwhile: take the times as rough."
        return sentences(where, say(rough, share=self.busy_share) if self.busy_share > BUSY_SHARE else "")

    def note(self) -> str:
        """``words`` as HTML, for above the figure."""
        return f'<div class="lk-note is-recorded">{html.prose(self.words())}</div>'


def recording(name: str) -> Recording | None:
    """The recorded run of that name; None when there is none. Raises ValueError for a file that is no recording."""
    try:
        path = data_path("recorded", f"{name}.json")
    except FileNotFoundError:
        return None
    found = read_json_object(path, max_bytes=MAX_BYTES)
    if found.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not a recording that labkit wrote: make it again with benchmarks/recorded.py.")
    return Recording(**found)


def keep(folder: Path, name: str, data: dict[str, Any], *, busy_share: float) -> Path:
    """Write what a panel drew from, with this machine's name and today's date; returns the file's path."""
    machine = this_machine()
    made = Recording(
        processor=machine.gpu or machine.cpu,
        n_cores=machine.n_cores,
        date=date.today().isoformat(),
        busy_share=round(busy_share, 2),
        data=_rounded(data),
    )
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"format": FORMAT, **asdict(made)}, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def _rounded(value: Any) -> Any:
    """The same, with its numbers to ``DIGITS`` decimals.

    >>> _rounded({"a": [0.123456789, 3]})
    {'a': [0.1234568, 3]}
    """
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


# --- runs as JSON


def trace_data(trace: Trace, *, steps: bool = False) -> dict[str, Any]:
    """A trace as JSON, without its layers' detail; its phases only where ``steps`` asks for them."""
    data = json.loads(trace.to_json())
    data["steps"] = [{**step, "detail": []} for step in data["steps"]] if steps else []
    return data


def trace_of(data: dict[str, Any]) -> Trace:
    return Trace.from_json(json.dumps(data))


def completion_data(completion: Completion) -> dict[str, Any]:
    """A finished run as JSON."""
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "trace": trace_data(completion.trace, steps=True),
    }


def completion_of(data: dict[str, Any]) -> Completion:
    return Completion(data["text"], data["token_ids"], data["finish_reason"], trace_of(data["trace"]))
