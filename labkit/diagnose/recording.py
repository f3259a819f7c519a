"""One answer as it came over the wire: bytes with their times, and nothing interpreted yet.

A recording is what is kept, sent to a colleague and replayed; everything else is computed from it. It holds no key
and no header that could carry one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from labkit.diagnose.wire import Read

FORMAT = "labkit-recording-1"
MARKS = ("connected", "secured", "sent", "headers")
"""Moments before the first byte of the answer, in order: TCP, TLS, the request is out, the headers are here."""
ENDINGS = ("closed", "dropped", "timeout", "limit", "stopped", "failed")
SOURCES = ("measured", "simulated", "recorded")
_KEPT_HEADERS = ("content-type", "content-encoding", "server", "via", "x-", "openai-", "cf-", "age")


@dataclass(frozen=True)
class Recording:
    """The reads of one answer and what was asked. Times in seconds since the request began."""

    reads: tuple[Read, ...] = ()
    end_s: float = 0.0
    ended: str = "closed"
    """closed: the stream ended; dropped: the connection broke; timeout, limit: we left; stopped; failed: no answer."""
    error: str | None = None
    """What went wrong, as a sentence."""
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    marks: dict[str, float] = field(default_factory=dict)
    url: str = ""
    dialect: str = ""
    max_new_tokens: int | None = None
    n_prompt_chars: int | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    source: str = "measured"
    timed: bool = True
    """False: the bytes are known, their times are not (a plain paste)."""

    def labelled(self, **meta: Any) -> Recording:
        return replace(self, meta={**self.meta, **meta})

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            **{name: getattr(self, name) for name in _PLAIN},
            "reads": [[r.at_s, _to_text(r.data), r.asked_s] for r in self.reads],
        }

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Recording:
        """Raises ValueError when this is no recording of labkit's."""
        try:
            if found["format"] != FORMAT:
                raise ValueError(f"unknown recording format {found['format']!r}: this labkit reads {FORMAT}.")
            reads = tuple(
                Read(float(at_s), _to_bytes(text), None if asked_s is None else float(asked_s))
                for at_s, text, asked_s in (_three(each) for each in found["reads"])
            )
            plain = {name: found[name] for name in _PLAIN if name in found}
            recording = cls(reads=reads, **plain)
            recording._check()
            return recording
        except (KeyError, TypeError, AttributeError, UnicodeEncodeError) as error:
            raise ValueError(f"not a recording of labkit's: {error!r}") from error

    def _check(self) -> None:
        if not all(isinstance(found, dict) for found in (self.headers, self.marks, self.meta)):
            raise ValueError("not a recording of labkit's: headers, marks and meta must be objects.")
        if self.ended not in ENDINGS or self.source not in SOURCES:
            raise ValueError(f"not a recording of labkit's: ended={self.ended!r}, source={self.source!r}.")
        times = [*(self.marks.get(name) for name in MARKS), *(read.at_s for read in self.reads), self.end_s]
        known = [float(at_s) for at_s in times if at_s is not None]
        if not all(0 <= at_s < 1e6 for at_s in known) or known != sorted(known):
            raise ValueError("not a recording of labkit's: its times do not run forward.")


_PLAIN = (
    *("source", "timed", "url", "dialect", "status", "headers", "marks", "end_s", "ended", "error"),
    *("max_new_tokens", "n_prompt_chars", "meta"),
)


def kept_headers(headers: dict[str, str]) -> dict[str, str]:
    """Those that say what stands between us and the model; none that could carry a secret."""
    return {
        name.lower(): value
        for name, value in headers.items()
        if name.lower().startswith(_KEPT_HEADERS) and "key" not in name.lower() and "auth" not in name.lower()
    }


def save(recordings: Sequence[Recording], path: str | Path) -> Path:
    """Write recordings as one JSON file that ``read`` and ``labkit diagnose`` take."""
    path = Path(path)
    path.write_text(to_json(recordings), encoding="utf-8")
    return path


def to_json(recordings: Sequence[Recording]) -> str:
    return json.dumps({"format": FORMAT, "recordings": [each.to_dict() for each in recordings]}, indent=1)


def from_json(found: Any) -> list[Recording]:
    """Of labkit's own JSON, parsed: one recording or a file of several (a report has them too)."""
    if isinstance(found, dict) and isinstance(found.get("recordings"), list):
        return [Recording.from_dict(each) for each in found["recordings"]]
    return [Recording.from_dict(found)]


def _three(found: Any) -> tuple[Any, Any, Any]:
    if not isinstance(found, list) or len(found) != 3:
        raise TypeError("a read is [seconds, text, seconds or null]")
    return found[0], found[1], found[2]


def _to_text(data: bytes) -> str:
    """Bytes that may end inside a character, as JSON can carry them (each such byte as a lone surrogate)."""
    return data.decode("utf-8", errors="surrogateescape")


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogateescape")
