"""Figures from probes: lines through medians, and nothing judged yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import mean, median

from labkit.diagnose.probes import Run, Workload
from labkit.diagnose.stream import Stream

BURST = 8
"""So many events together are no step of a server: a buffer let them go. (Speculative decoding sends fewer.)"""
MIN_EVENTS = 12
LONG_PROMPT = 200
"""Tokens from which on a slow start is laid to the prompt, when nothing else is known."""


@dataclass(frozen=True)
class Line:
    """y = intercept + slope x."""

    intercept: float
    slope: float
    noise: float = 0.0
    """Median distance of the points from the line."""
    reach: float = 0.0
    """How far apart the outermost x are."""

    @property
    def means_something(self) -> bool:
        """Whether the slope moved the points more than chance did."""
        return self.slope * self.reach > 2.5 * self.noise

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x


def fit(points: Sequence[tuple[float, float]]) -> Line | None:
    """The line of Theil and Sen: the median of all pairs' slopes, which one bad point does not move.

    >>> fit([(1.0, 3.0), (2.0, 5.0), (3.0, 7.0), (4.0, 90.0)]).slope
    2.0

    None without points; a level line when all have one x.
    """
    if not points:
        return None
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if a[0] != b[0]]
    slope = median(slopes) if slopes else 0.0
    intercept = median(y - slope * x for x, y in points)
    xs = [x for x, _ in points]
    return Line(intercept, slope, median(abs(y - intercept - slope * x) for x, y in points), max(xs) - min(xs))


@dataclass(frozen=True)
class Load:
    """What several at once saw."""

    n: int
    ttft_s: float
    """Mean over the wave: with half of them waiting, the median would show nobody's wait."""
    worst_ttft_s: float
    tpot_s: float | None
    client_share: float


@dataclass(frozen=True)
class Measured:
    """A server in figures. Seconds and tokens; None for what was not measured."""

    workload: Workload
    n_prompt: float = 0.0
    """The workload's prompt in the server's own tokens, where it counts them."""
    prefill: Line | None = None
    """TTFT against fresh prompt tokens, one request at a time."""
    decode: Line | None = None
    """TPOT against the context."""
    first_s: float | None = None
    repeat_s: tuple[float, float] | None = None
    """(fresh, repeated) TTFT of one prompt."""
    n_repeat: float = 0.0
    n_cached: int | None = None
    stream_ttft_s: float | None = None
    one_ttft_s: float | None = None
    held_share: float = 0.0
    """Share of a long answer's events that came in bursts no server makes."""
    n_bursts: int = 0
    n_events: int = 0
    client_share: float | None = None
    loads: tuple[Load, ...] = ()
    server: dict[str, float] = field(default_factory=dict)
    """The server's own medians for single requests: queue_s, prefill_s, decode_s (a token), as far as it says."""
    n_errors: int = 0
    first_error: str | None = None
    n_streams: int = 0
    alone: bool = False
    """One prompt length only: what grows with the prompt is the server's word, or a guess."""

    @property
    def ttft_s(self) -> float | None:
        return None if self.prefill is None else max(0.0, self.prefill.at(self.n_prompt))

    @property
    def prefill_s(self) -> float:
        """The part of a workload's TTFT that grows with the prompt."""
        line = self.prefill
        return max(0.0, line.slope) * self.n_prompt if line and line.means_something else 0.0

    @property
    def tpot_s(self) -> float | None:
        return None if self.decode is None else max(0.0, self.decode.at(self.n_prompt))

    @property
    def load(self) -> Load | None:
        """The wave nearest to the workload's concurrency."""
        return min(self.loads, key=lambda each: abs(each.n - self.workload.concurrency), default=None)

    @property
    def total_s(self) -> float:
        """One whole answer of the workload, alone."""
        return (self.ttft_s or 0.0) + (self.workload.n_new_tokens - 1) * (self.tpot_s or 0.0)


def measure(run: Run, workload: Workload) -> Measured:
    """The figures of a run of probes."""
    stream, one = run.of("stream"), run.of("one")
    lengths = run.of("length") or run.of("first")  # a server so slow that nothing else fitted the budget
    repeats = run.of("repeat")
    alone = [*lengths, *stream, *one, *repeats]
    fresh, again = [s for s in repeats if s.recording.meta["nth"] == 0], [s for s in repeats if s.recording.meta["nth"]]
    prefill = fit([(n_fresh(s), s.ttft_s or 0.0) for s in lengths])
    guessed = prefill is not None and prefill.reach == 0
    if prefill is not None and guessed:
        prefill = _split(prefill.intercept, n_fresh(lengths[0]), own_times(lengths))
    decode = fit(
        [(n_prompt(s) + len(s.tokens) / 2, s.tpot_s) for s in [*lengths, *stream] if len(s.tokens) > 3 and s.tpot_s]
    )
    held, n_bursts, n_events = _held(stream or lengths)
    shares = [s.client_share for s in alone if s.client_share is not None]
    first = run.of("first")
    failed = [s for s in run.streams if s.error]
    return Measured(
        workload,
        n_prompt=_in_tokens(workload.n_prompt_tokens, alone),
        prefill=prefill,
        decode=decode,
        first_s=first[0].ttft_s if first else None,
        repeat_s=(fresh[0].ttft_s or 0.0, median(s.ttft_s or 0.0 for s in again)) if fresh and again else None,
        n_repeat=n_prompt(fresh[0]) if fresh else 0.0,
        n_cached=max((s.cached_tokens for s in again if s.cached_tokens is not None), default=None),
        stream_ttft_s=median(s.ttft_s or 0.0 for s in stream) if stream else None,
        one_ttft_s=median(s.ttft_s or 0.0 for s in one) if one else None,
        held_share=held,
        n_bursts=n_bursts,
        n_events=n_events,
        client_share=median(shares) if shares else None,
        loads=_loads(run),
        server=own_times(alone),
        n_errors=len(failed),
        first_error=failed[0].error if failed else None,
        n_streams=len(run.streams),
        alone=guessed,
    )


def measure_alone(streams: Sequence[Stream]) -> Measured:
    """The figures of recordings that came from elsewhere, all of one server.

    The server's own times split a TTFT where it gives them; without them a long prompt is taken for the cause of it.
    """
    seen = [s for s in streams if s.tokens]
    told = own_times(seen)
    timed = [s for s in seen if s.recording.timed]
    n = median(n_prompt(s) for s in seen) if seen else 0.0
    ttft = median(s.ttft_s or 0.0 for s in timed) if timed else None
    pace = [s.tpot_s for s in timed if s.tpot_s is not None]
    tpot = median(pace) if pace else None
    if not timed and "prefill_s" in told:
        ttft, tpot = told["prefill_s"] + told.get("queue_s", 0.0), told.get("decode_s")
    whole = [s for s in timed if not s.recording.meta.get("coarse")]
    held, n_bursts, n_events = _held(whole)
    shares = [s.client_share for s in whole if s.client_share is not None]
    failed = [s for s in streams if s.error]
    return Measured(
        Workload(concurrency=1),
        n_prompt=max(n, 1.0),
        prefill=None if ttft is None else _split(ttft, n, told),
        decode=None if tpot is None else Line(tpot, 0.0),
        n_cached=max((s.cached_tokens for s in seen if s.cached_tokens is not None), default=None),
        held_share=held,
        n_bursts=n_bursts,
        n_events=n_events,
        client_share=median(shares) if shares else None,
        server=told,
        n_errors=len(failed),
        first_error=failed[0].error if failed else None,
        n_streams=len(streams),
        alone=True,
    )


def _split(ttft_s: float, n: float, told: dict[str, float]) -> Line:
    """A line through one point: by the server's own prefill, else a long prompt is taken for all of it."""
    part = min(told.get("prefill_s", ttft_s if n >= LONG_PROMPT else 0.0), ttft_s)
    return Line(ttft_s - part, part / max(n, 1.0), reach=1.0)


def n_prompt(stream: Stream) -> float:
    """Prompt tokens by the server's count, else the words that were sent, else characters over four."""
    if stream.usage.prompt_tokens:
        return float(stream.usage.prompt_tokens)
    words = stream.recording.meta.get("n_words")
    return float(words) if words else (stream.recording.n_prompt_chars or 0) / 4


def n_fresh(stream: Stream) -> float:
    """Prompt tokens that had to be read: without those the server says it had."""
    return max(1.0, n_prompt(stream) - (stream.cached_tokens or 0))


def own_times(streams: Sequence[Stream]) -> dict[str, float]:
    """Medians of what the server says of itself: queue_s, prefill_s, decode_s a token, prefill_tok_s."""
    found: dict[str, list[float]] = {}
    for timings in (s.timings for s in streams if s.timings):
        if "queue_ms" in timings:
            found.setdefault("queue_s", []).append(timings["queue_ms"] / 1e3)
        if "prompt_ms" in timings:
            found.setdefault("prefill_s", []).append(timings["prompt_ms"] / 1e3)
            if timings["prompt_ms"] > 0 and timings.get("prompt_n"):
                found.setdefault("prefill_tok_s", []).append(1e3 * timings["prompt_n"] / timings["prompt_ms"])
        if timings.get("predicted_n", 0) > 1 and "predicted_ms" in timings:
            found.setdefault("decode_s", []).append(timings["predicted_ms"] / 1e3 / (timings["predicted_n"] - 1))
    return {name: median(values) for name, values in found.items()}


def _in_tokens(n_words: int, streams: Sequence[Stream]) -> float:
    """A prompt of so many of our words, in the server's tokens."""
    points = [(float(s.recording.meta["n_words"]), n_prompt(s)) for s in streams if "n_words" in s.recording.meta]
    line = fit(points)
    return max(1.0, line.at(n_words)) if line and len({x for x, _ in points}) > 1 else float(n_words)


def _held(streams: Sequence[Stream]) -> tuple[float, int, int]:
    """(share of events in bursts, bursts, events) of the longest answer; nothing can be said of a short one."""
    longest = max(streams, key=lambda s: len(s.chunks), default=None)
    if longest is None or len(longest.chunks) < MIN_EVENTS:
        return 0.0, 0, 0
    n = len(longest.chunks)
    return sum(k for _, k in longest.bursts if k >= BURST) / n, len(longest.bursts), n


def _loads(run: Run) -> tuple[Load, ...]:
    levels = sorted({s.recording.meta["concurrency"] for s in run.of("load")})
    found = []
    for n in levels:
        streams = run.of("load", concurrency=n)
        ttft = [s.ttft_s or 0.0 for s in streams]
        tpot = [s.tpot_s for s in streams if s.tpot_s is not None]
        shares = [s.client_share for s in streams if s.client_share is not None]
        busy = median(shares) if shares else 0.0
        found.append(Load(n, mean(ttft), max(ttft), median(tpot) if tpot else None, busy))
    return tuple(found)
