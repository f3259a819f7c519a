"""A recording from elsewhere gets a verdict too: labkit's own JSON, a HAR file, what curl printed.

    labkit diagnose URL --save run.json                 everything
    curl -sN -o /dev/null --trace - --trace-time ...    the bytes with their times (--trace-ascii too)
    curl -N ... | ts -s '%.s'                           each line with its second
    curl -N ...                                         no times: only what the server says of itself
    a HAR file of a browser's network tab               the first byte and the last

Nothing is sent anywhere. What is pasted is data: it is parsed, shown escaped, never run.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from labkit.diagnose.recording import Recording, from_json, kept_headers
from labkit.diagnose.wire import Read

MAX_BYTES = 50_000_000
_TRACE = re.compile(r"^(\d\d:\d\d:\d\d\.\d+) (=>|<=|==) (.*)$")
_ROW = re.compile(r"^[0-9a-f]{4,}: ")
_HEX_ROW = re.compile(r"^[0-9a-f]{4,}: ((?:[0-9a-f]{2} ){1,16})")
_STAMPED = re.compile(
    r"^\[?(\d+(?:[.:]\d+)*|\d{4}-\d\d-\d\d[T ][\d:.]+Z?|[A-Z][a-z]{2} \d+ [\d:.]+)\]? (?=data:|event:|:|$)"
)
_STATUS = re.compile(r"^HTTP/[\d.]+ (\d{3})")


def read_file(path: str | Path) -> list[Recording]:
    """The recordings of a file. Raises ValueError that says what it takes when it is none of those."""
    path = Path(path)
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes; a recording of a few answers has far fewer.")
    return read_text(path.read_text(encoding="utf-8", errors="replace"))


def read_text(text: str) -> list[Recording]:
    """The recordings in a pasted text. Raises ValueError that says what it takes when there are none."""
    text = text.removeprefix("\ufeff")
    if not text.strip():
        raise ValueError("nothing is pasted yet: paste what `curl -N --trace - --trace-time ...` printed.")
    if len(text) > MAX_BYTES:
        raise ValueError(f"{len(text):,} characters are too many for a recording.")
    found = _of_json(text) or _of_curl_trace(text) or _of_lines(text)
    if not found:
        raise ValueError(
            "no stream of tokens is in this text: give labkit's JSON, a HAR file, or what `curl -N` printed (its "
            "lines begin with data:)."
        )
    return found


def _of_json(text: str) -> list[Recording]:
    if not text.lstrip().startswith("{"):
        return []
    try:
        found = json.loads(text)
    except ValueError:
        return []
    if not isinstance(found, dict):
        return []
    if isinstance(found.get("log"), dict):
        return _of_har(found["log"])
    if "recordings" in found or str(found.get("format", "")).startswith("labkit"):
        return from_json(found)
    if "choices" in found or "generated_text" in found:
        head = {"content-type": "application/json"}
        return [Recording(reads=(Read(0.0, text.encode()),), source="recorded", timed=False, headers=head)]
    return []


def _of_har(log: dict[str, Any]) -> list[Recording]:
    """Each entry that streamed. A HAR gives the first byte and the last; Chrome gives an EventSource's events."""
    found = []
    entries = log.get("entries")
    for entry in entries if isinstance(entries, list) else []:
        try:
            recording = _of_entry(entry)
        except (KeyError, TypeError, AttributeError, ValueError, binascii.Error):
            continue  # an entry of another kind, or a broken one
        if recording:
            found.append(recording)
    if not found:
        raise ValueError("this HAR file has no answer with events (data: ...): record it while the answer streams.")
    return found


def _of_entry(entry: dict[str, Any]) -> Recording | None:
    answer, times = entry["response"], entry["timings"]
    content = answer["content"]
    text = content.get("text") or ""
    body = base64.b64decode(text) if content.get("encoding") == "base64" else text.encode()
    headers = {str(h["name"]): str(h["value"]) for h in answer.get("headers", [])}
    messages = entry.get("_eventSourceMessages") or []
    if b"data:" not in body and not messages:
        return None
    known = {name: max(0.0, float(times.get(name) or 0.0)) / 1e3 for name in
             ("blocked", "dns", "connect", "send", "wait", "receive")}  # fmt: skip
    connected_s = known["blocked"] + known["dns"] + known["connect"]
    headers_s = connected_s + known["send"] + known["wait"]
    end_s = headers_s + known["receive"]
    shared: dict[str, Any] = {
        "status": int(answer["status"]),
        "headers": kept_headers(headers),
        "source": "recorded",
        "url": str(entry["request"]["url"]).split("?")[0],
        "marks": {"connected": connected_s, "sent": connected_s + known["send"], "headers": headers_s},
    }
    if messages:
        start_s = datetime.fromisoformat(str(entry["startedDateTime"]).replace("Z", "+00:00")).timestamp()
        reads = tuple(Read(max(0.0, float(m["time"]) - start_s), f"data: {m['data']}\n\n".encode()) for m in messages)
        end_s = max(end_s, reads[-1].at_s)
        return Recording(reads=reads, end_s=end_s, **{**shared, "marks": {}})
    first = re.search(rb"\n\n|\r\n\r\n", body)
    cut = first.end() if first else len(body)
    reads = tuple(Read(at_s, data) for at_s, data in ((headers_s, body[:cut]), (end_s, body[cut:])) if data)
    return Recording(reads=reads, end_s=end_s, meta={"coarse": True}, **shared)


def _of_curl_trace(text: str) -> list[Recording]:
    """curl's --trace or --trace-ascii with --trace-time: one recording for each request."""
    blocks: list[tuple[float, str, str, list[str]]] = []
    for line in text.splitlines():
        if head := _TRACE.match(line):
            blocks.append((_seconds(head.group(1)), head.group(2), head.group(3), []))
        elif blocks and _ROW.match(line):  # not what curl printed of the answer itself in between
            blocks[-1][3].append(line)
    found: list[Recording] = []
    start: float | None = None
    reads: list[Read] = []
    marks: dict[str, float] = {}
    heads: list[str] = []

    def close() -> None:
        if start is not None and reads:
            status, headers = _head_of(heads)
            end_s = reads[-1].at_s
            found.append(
                Recording(tuple(reads), end_s, status=status, headers=headers, marks=dict(marks), source="recorded")
            )
        reads.clear()
        marks.clear()
        heads.clear()

    for at, direction, what, rows in blocks:
        if direction == "=>" and what.startswith("Send header"):
            close()
            start = at
            marks["sent"] = 0.0
        elif start is None or direction != "<=":
            continue
        since = (at - start) % 86_400.0
        if direction == "<=" and "header" in what:
            marks["headers"] = since
            heads += [_ROW.sub("", row, count=1) for row in _plain(rows)]
        elif direction == "<=" and "data" in what and "SSL" not in what:
            reads.append(Read(since, _payload(rows)))
    close()
    return found


def _plain(rows: Iterable[str]) -> list[str]:
    rows = list(rows)
    if all(_HEX_ROW.match(row) for row in rows if row):
        return [_payload(rows).decode("latin-1").strip()]
    return rows


def _payload(rows: list[str]) -> bytes:
    """The bytes of a dump; a dump of characters has lost its line ends, which stand before each ``data:``."""
    rows = [row for row in rows if row]
    hexes = [_HEX_ROW.match(row) for row in rows]
    if rows and all(hexes):
        return b"".join(bytes.fromhex(row.group(1)) for row in hexes if row)
    joined = "".join(_ROW.sub("", row, count=1) for row in rows)
    return re.sub(r"\.{0,4}(?=data: ?[\[{])", "\n\n", joined).rstrip(".").encode() + b"\n\n"


def _head_of(rows: list[str]) -> tuple[int | None, dict[str, str]]:
    status = next((int(m.group(1)) for row in rows if (m := _STATUS.match(row))), None)
    pairs = [row.split(":", 1) for row in rows if ":" in row]
    return status, kept_headers({name.strip(): value.strip() for name, value in pairs})


def _of_lines(text: str) -> list[Recording]:
    """Events as printed, each line with a time before it or none."""
    if not re.search(r"(?m)^(?:\S+ ){0,3}(?:data:|\{)", text):
        return []
    lines = re.split(r"\r\n|\n|\r", text)
    stamped = [(m, line) for line in lines if line.strip() and (m := _STAMPED.match(line))]
    with_data = [line for line in lines if "data:" in line]
    if stamped and len(stamped) >= 0.8 * len(with_data):
        first: float | None = None
        reads = []
        for match, line in stamped:
            at = _seconds(match.group(1))
            first = at if first is None else first
            relative = at if first < 3600 and ":" not in match.group(1) else at - first
            reads.append(Read(max(0.0, relative), line[match.end() :].encode() + b"\n"))
        if [r.at_s for r in reads] == sorted(r.at_s for r in reads):
            return [Recording(tuple(reads), reads[-1].at_s, source="recorded", meta={"stamped": "lines"})]
    status, headers = _head_of([line for line in lines[:40] if not line.startswith(("data:", "{"))])
    body = "\n".join(lines).encode()
    if b"data:" not in body and b'"choices"' not in body and b'"token"' not in body and b'"text_output"' not in body:
        return []
    kept = {k: v for k, v in headers.items() if k != "content-type"}
    return [Recording((Read(0.0, body),), 0.0, status=status, headers=kept, source="recorded", timed=False)]


def _seconds(stamp: str) -> float:
    """A time of day, a date, or seconds, as seconds. Raises ValueError for anything else."""
    if re.fullmatch(r"\d+(\.\d+)?", stamp):
        return float(stamp)
    if "-" in stamp:
        return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
    clock = stamp.rsplit(" ", 1)[-1]
    total = 0.0
    for part in clock.split(":"):
        total = total * 60 + float(part)
    return total
