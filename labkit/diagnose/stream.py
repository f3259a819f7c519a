"""What a recording says: when each token came, and what the server told about itself.

An event bears a token when it carries text, reasoning, a tool call, or when the server's count rose. Servers merge
tokens into one event (``--stream-interval``, speculative decoding) and send events without text for tokens whose
characters are not complete, so a stream's events are not its tokens: ``Token.at_s`` is when a token was seen here,
``Token.made_s`` when it was made at the latest, spread over the gap that its event ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from labkit.diagnose.dialects import Delta, Usage, read_event
from labkit.diagnose.recording import Recording
from labkit.diagnose.wire import Event, EventReader, WireError

CHARS_A_TOKEN = 4.2
"""Of English, in today's vocabularies: for servers that merge tokens and count none."""
SAME_S = 0.0005
"""Events this near came together: one read, or one packet cut in two."""


@dataclass(frozen=True)
class Token:
    at_s: float
    made_s: float
    event_idx: int


@dataclass(frozen=True)
class Stream:
    """A recording, read. All times in seconds since the request began; None for what did not come."""

    recording: Recording
    events: tuple[tuple[Event, Delta], ...]
    tokens: tuple[Token, ...]
    counted_by: str
    """How the tokens of each event are known: "events" (the server counts them), "usage" (its total, shared out),
    "limit" (the total asked for, which ended the answer), "text" (a guess from its length), "one each"."""
    n_pings: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def headers_s(self) -> float | None:
        return self.recording.marks.get("headers")

    @cached_property
    def first_event_s(self) -> float | None:
        """The first event of any kind: what a client that counts the role chunk calls TTFT."""
        return next((e.at_s for e, d in self.events if d.has_choices or d.has_text), None)

    @property
    def first_token_s(self) -> float | None:
        return self.tokens[0].at_s if self.tokens else None

    @property
    def ttft_s(self) -> float | None:
        """To the first token, on an open connection: what connecting took is not the server's."""
        marks = self.recording.marks
        open_s = marks.get("secured", marks.get("connected", 0.0))
        return None if self.first_token_s is None else self.first_token_s - open_s

    @cached_property
    def first_answer_s(self) -> float | None:
        """The first token of the answer itself, after any reasoning."""
        return next((e.at_s for e, d in self.events if d.text), None)

    @property
    def last_token_s(self) -> float | None:
        return self.tokens[-1].at_s if self.tokens else None

    @property
    def itl_s(self) -> list[float]:
        """One for each token after the first, as the tokens were made."""
        return [b.made_s - a.made_s for a, b in pairwise(self.tokens)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first: (last - first) / (n - 1)."""
        if len(self.tokens) < 2:
            return None
        return (self.tokens[-1].at_s - self.tokens[0].at_s) / (len(self.tokens) - 1)

    @cached_property
    def chunks(self) -> list[tuple[float, int]]:
        """(time, tokens) of each event that bears any."""
        counts: dict[int, int] = {}
        for token in self.tokens:
            counts[token.event_idx] = counts.get(token.event_idx, 0) + 1
        return [(self.events[idx][0].at_s, n) for idx, n in sorted(counts.items())]

    @cached_property
    def bursts(self) -> list[tuple[float, int]]:
        """(time, events) of what came together, one read or at most half a millisecond apart."""
        found: list[tuple[float, int]] = []
        last_s = -1.0
        for at_s, _ in self.chunks:
            if found and at_s - last_s <= SAME_S:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((at_s, 1))
            last_s = at_s
        return found

    @cached_property
    def client_share(self) -> float | None:
        """Share of the streaming time that the client itself was busy with; None when nobody measured it."""
        reads = self.recording.reads
        if len(reads) < 2 or any(read.asked_s is None for read in reads[1:]):
            return None
        total = reads[-1].at_s - reads[0].at_s
        busy = sum(max(0.0, (b.asked_s or 0.0) - a.at_s) for a, b in pairwise(reads))
        return busy / total if total > 0 else 0.0

    @property
    def text(self) -> str:
        return "".join(delta.text for _, delta in self.events)

    @property
    def reasoning(self) -> str:
        return "".join(delta.reasoning for _, delta in self.events)

    @cached_property
    def usage(self) -> Usage:
        """The last value of each count that the server gave."""
        seen = [delta.usage for _, delta in self.events if delta.usage]
        last = {
            name: next((v for u in reversed(seen) if (v := getattr(u, name)) is not None), None)
            for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
        }
        return Usage(**last)

    @cached_property
    def timings(self) -> dict[str, float]:
        """The server's own, where it gives them (llama.cpp and labkit, at the end of the stream)."""
        return next((delta.timings for _, delta in reversed(self.events) if delta.timings), {})

    @property
    def cached_tokens(self) -> int | None:
        if self.usage.cached_tokens is not None:
            return self.usage.cached_tokens
        return int(self.timings["cache_n"]) if "cache_n" in self.timings else None

    @cached_property
    def finish_reason(self) -> str | None:
        return next((d.finish_reason for _, d in reversed(self.events) if d.finish_reason), None)

    @cached_property
    def error(self) -> str | None:
        """An error that came as an event under HTTP 200, or what ended the recording."""
        return next((d.error for _, d in self.events if d.error), None) or self.recording.error

    @property
    def complete(self) -> bool:
        """Whether the server said that it was done, or (Triton) closed the connection without an error."""
        said = self.finish_reason is not None or any(delta.done for _, delta in self.events)
        return self.error is None and bool(self.tokens) and (said or self.recording.ended == "closed")

    def summary(self) -> dict[str, Any]:
        """The figures a reader asks for first: milliseconds and tokens."""
        ttft, tpot = self.first_token_s, self.tpot_s
        timed = self.recording.timed
        return {
            "ttft_ms": ttft * 1e3 if timed and ttft is not None else None,
            "tpot_ms": tpot * 1e3 if timed and tpot is not None else None,
            "n_tokens": len(self.tokens),
            "n_chunks": len(self.chunks),
            "n_prompt_tokens": self.usage.prompt_tokens,
            "n_cached_tokens": self.cached_tokens,
            "wall_ms": self.recording.end_s * 1e3 if timed else None,
            "finish_reason": self.finish_reason,
            "error": self.error,
        }


def read_stream(recording: Recording) -> Stream:
    """Everything that can be said of a recording without another one."""
    reader, found, notes = EventReader(), [], []
    if recording.reads and "json" in recording.headers.get("content-type", "").split(";")[0].split("/")[-1].split("+"):
        whole = b"".join(read.data for read in recording.reads)
        found = [Event(recording.reads[-1].at_s, whole.decode("utf-8", errors="replace"))]
        notes.append("The answer came whole, not as a stream: only its end has a time.")
    try:
        for read in recording.reads if not found else ():
            found += reader.push(read)
        found += reader.flush()
    except WireError as error:
        notes.append(str(error))
    events = [(event, delta) for event in found if (delta := read_event(event.data, event.name)) is not None]
    events = _without_repeats(events)
    counts, counted_by = _tokens_of_events([delta for _, delta in events], recording.max_new_tokens)
    return Stream(recording, tuple(events), _spread(events, counts), counted_by, reader.n_pings, tuple(notes))


def _without_repeats(events: list[tuple[Event, Delta]]) -> list[tuple[Event, Delta]]:
    """Cumulative text (SGLang's own endpoint, some Triton models) as what each event added."""
    texts = [delta.text for _, delta in events if delta.text]
    grows = all(b.startswith(a) for a, b in pairwise(texts))
    if len(texts) < 3 or not grows or len(set(texts)) < 2:
        return events
    out, before = [], ""
    for event, delta in events:
        if delta.text:
            added, before = delta.text[len(before) :], delta.text
            delta = Delta(**{**vars(delta), "text": added})
        out.append((event, delta))
    return out


def _tokens_of_events(deltas: list[Delta], n_asked: int | None) -> tuple[list[int], str]:
    """How many tokens each event bears, and how that is known."""
    n = len(deltas)
    counts = [0] * n
    if any(delta.n_tokens is not None for delta in deltas):
        return [delta.n_tokens or 0 for delta in deltas], "events"
    rising = [d.usage.completion_tokens if d.usage else None for d in deltas]
    known = [count for count in rising if count is not None]
    bearing = [idx for idx in range(n) if deltas[idx].has_text]
    if sum(rising[idx] is not None for idx in bearing) >= max(2, len(bearing) - 1) and known == sorted(known):
        before = 0
        for idx, count in enumerate(rising):
            if count is not None:
                counts[idx], before = count - before, count
        return counts, "events"
    for idx in bearing:
        counts[idx] = 1
    total, counted_by = _total(deltas, known, len(bearing), n_asked)
    spare = total - len(bearing)
    if spare <= 0 or not bearing:
        return counts, counted_by if known else "one each"
    _share_out(deltas, counts, bearing, spare)
    return counts, counted_by


def _total(deltas: list[Delta], known: list[int], n_bearing: int, n_asked: int | None) -> tuple[int, str]:
    """(tokens of the answer, how that is known): the server's count, the limit that ended it, or the text's length."""
    if known:
        return known[-1], "usage"
    if n_asked and any(delta.finish_reason == "length" for delta in deltas):
        return n_asked, "limit"
    n_chars = sum(len(delta.text + delta.reasoning + delta.tool) for delta in deltas)
    guess = min(round(n_chars / CHARS_A_TOKEN), n_asked or 0)
    return (guess, "text") if guess > 1.5 * n_bearing else (n_bearing, "one each")


def _share_out(deltas: list[Delta], counts: list[int], bearing: list[int], spare: int) -> None:
    """Give ``spare`` tokens, which the final count knows of, to the events that may have borne them, in place.

    First the end token to the event with the finish reason, then one to each event without text inside the answer,
    then the rest to events with text: equally when all can be of one size (a stream interval), else by their length.
    """
    finish = next((i for i in range(len(deltas)) if deltas[i].finish_reason == "stop" and not deltas[i].has_text), None)
    silent = [i for i in range(bearing[0] + 1, len(deltas)) if deltas[i].has_choices and not deltas[i].has_text]
    for idx in ([finish] if finish is not None else []) + [i for i in silent if i != finish]:
        if spare > 0 and not (deltas[idx].finish_reason and idx != finish):
            counts[idx], spare = 1, spare - 1
    rest = bearing[1:]
    if spare <= 0:
        return
    lengths = [len(deltas[i].text + deltas[i].reasoning + deltas[i].tool) for i in bearing]
    for idx, n in zip(rest, _equal_steps(spare + len(rest), lengths[1:]), strict=False):
        counts[idx], spare = n, 0
    given, so_far = 0, 0
    for idx, length in zip(bearing, lengths, strict=True):
        so_far += length
        more = round(spare * so_far / sum(lengths)) - given
        counts[idx], given = counts[idx] + more, given + more


def _equal_steps(n_tokens: int, lengths: list[int]) -> list[int]:
    """k, k, ..., k and a last one of at most k, where k and the events' texts agree best; empty when no k does."""
    n = len(lengths)
    if not n:
        return []
    largest = (n_tokens - 1) // (n - 1) if n > 1 else n_tokens
    fits = [[k] * (n - 1) + [n_tokens - k * (n - 1)] for k in range(-(-n_tokens // n), largest + 1)]
    a_token = sum(lengths) / n_tokens

    def error(counts: list[int]) -> float:
        return sum((length - a_token * count) ** 2 for length, count in zip(lengths, counts, strict=True))

    best = min(fits, key=error, default=[])
    return best if best and error(best) < 0.15 * sum(length**2 for length in lengths) else []


def _spread(events: list[tuple[Event, Delta]], counts: list[int]) -> tuple[Token, ...]:
    """Tokens of one event were made one after the other since the event before it."""
    tokens: list[Token] = []
    before: float | None = None
    for idx, (event, _) in enumerate(events):
        n = counts[idx]
        if n <= 0:
            continue
        start = event.at_s if before is None else before
        tokens += [Token(event.at_s, start + (event.at_s - start) * (k + 1) / n, idx) for k in range(n)]
        before = event.at_s
    return tuple(tokens)
