"""From bytes to events: server-sent events, stamped before they are read.

A token's time is the time of the read that brought its last byte, so decoding, parsing and printing cost nothing on
the clock. Lines end with CRLF, LF or CR, and a CRLF may be cut between two reads; they are cut as bytes, because
``str.splitlines`` would also cut at U+2028 and U+0085, which a model may write. No UTF-8 character contains a line
end, so a whole line decodes whole, however its bytes were cut.

Source: WHATWG HTML, "Server-sent events", 9.2.6; with what servers do beside it (``error:`` lines of llama.cpp, a
stream that ends without a blank line, pasted text whose blank lines were lost).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

MAX_EVENT_BYTES = 8_000_000
"""One event longer than this is not a token."""
_LINE_END = re.compile(rb"\r\n|\n|\r")


class WireError(ValueError):
    """What came is no stream of events."""


@dataclass(frozen=True)
class Read:
    """Bytes as they came in one piece. Seconds since the request began."""

    at_s: float
    data: bytes
    asked_s: float | None = None
    """When the client was ready for them: what lies between the last read and this is the client's own time."""


@dataclass(frozen=True)
class Event:
    """One event of the stream: its data, and when the last byte of it was here."""

    at_s: float
    data: str
    name: str = ""
    read_idx: int = 0


class EventReader:
    """``push(read)`` gives the events that are complete with it, ``flush()`` what the end of the stream completes.

    >>> reader = EventReader()
    >>> [event.data for event in reader.push(Read(0.1, b'data: {"a": 1}'))]
    []
    >>> [event.data for event in reader.push(Read(0.2, b"\\r\\n\\r\\n: ping\\n\\ndata:2\\n\\n"))]
    ['{"a": 1}', '2']
    """

    def __init__(self) -> None:
        self.n_pings = 0
        self._pending = bytearray()
        self._scanned = 0
        self._after_cr = False
        self._n_reads = 0
        self._at_s = 0.0
        self._lines: list[tuple[float, int, str]] = []
        self._name = ""
        self._first = True

    def push(self, read: Read) -> list[Event]:
        """Raises WireError when a single event grows beyond 8 MB."""
        self._at_s = read.at_s
        data = read.data
        if self._after_cr and data:
            data = data[1:] if data[:1] == b"\n" else data
            self._after_cr = False
        self._pending += data
        found: list[Event] = []
        start = 0
        for end in _LINE_END.finditer(self._pending, self._scanned):
            found += self._line(bytes(self._pending[start : end.start()]))
            start = end.end()
            self._after_cr = end.group() == b"\r" and start == len(self._pending)
        del self._pending[:start]
        self._scanned = len(self._pending)
        if self._scanned > MAX_EVENT_BYTES:
            raise WireError(f"{self._scanned:,} bytes without the end of a line: this is no stream of tokens.")
        self._n_reads += 1
        return found

    def flush(self) -> list[Event]:
        """The end of the stream ends the last line and the last event."""
        rest, self._pending, self._scanned = bytes(self._pending), bytearray(), 0
        return (self._line(rest) if rest else []) + self._dispatch()

    def _line(self, raw: bytes) -> list[Event]:
        line = raw.decode("utf-8", errors="replace")
        if self._first:
            line, self._first = line.removeprefix("\ufeff"), False
        if not line:
            return self._dispatch()
        if line.startswith(":"):
            self.n_pings += 1
            return []
        field, _, value = line.partition(":")
        if field in ("data", "error"):
            self._lines.append((self._at_s, self._n_reads, value.removeprefix(" ")))
            self._name = "error" if field == "error" else self._name
        elif field == "event":
            self._name = value.strip()
        elif line.lstrip().startswith("{"):  # lines of JSON without the field: what is left of them is the same
            return [*self._dispatch(), Event(self._at_s, line, "", self._n_reads)]
        return []

    def _dispatch(self) -> list[Event]:
        lines, name = self._lines, self._name
        self._lines, self._name = [], ""
        if len(lines) > 1 and all(_stands_alone(text) for _, _, text in lines):
            return [Event(at_s, text, name, idx) for at_s, idx, text in lines]  # pasted without its blank lines
        if not lines:
            return []
        at_s, idx, _ = lines[-1]
        return [Event(at_s, "\n".join(text for _, _, text in lines), name, idx)]


def _stands_alone(text: str) -> bool:
    if text.strip() == "[DONE]":
        return True
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
