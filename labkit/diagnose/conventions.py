"""One stream, and what every tool would call its latency.

"TTFT" has two meanings and "ITL" four. On one recording they can stand side by side: the same server, the same
bytes, other figures. Where several tokens share an event, a tool that counts events reports gaps that no token had.

Sources: the tools' own code as of autumn 2026 (vLLM ``benchmarks/lib/endpoint_request_func.py``, guidellm, AIPerf,
inference-perf, llmperf; TGI's ``time_per_token`` log field).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from labkit.diagnose.stream import Stream
from labkit.perf.trace import quantile


@dataclass(frozen=True)
class Latencies:
    """What one tool reports for one request, in seconds; None for what it does not report."""

    ttft_s: float | None
    itl_s: tuple[float, ...]
    """Every value that goes into its percentiles."""
    tpot_s: float | None = None


@dataclass(frozen=True)
class Convention:
    tool: str
    says: str
    of: Callable[[Stream], Latencies]


def _events(stream: Stream, *, choices: bool = False) -> list[float]:
    """Times of the events with text, or of all that have ``choices``."""
    return [e.at_s for e, d in stream.events if (d.has_choices if choices else d.has_text)]


def _gaps(times: list[float]) -> tuple[float, ...]:
    return tuple(b - a for a, b in pairwise(times))


def _vllm(stream: Stream) -> Latencies:
    times, n = _events(stream, choices=True), len(stream.tokens)
    tpot = (times[-1] - times[0]) / (n - 1) if times and n > 1 else None
    return Latencies(times[0] if times else None, _gaps(times), tpot)


def _guidellm(stream: Stream) -> Latencies:
    times, n = _events(stream), len(stream.tokens)
    if not times:
        return Latencies(None, ())
    mean = (times[-1] - times[0]) / (n - 1) if n > 1 else None
    return Latencies(times[0], () if mean is None else (mean,), times[-1] / n if n else None)


def _aiperf(stream: Stream) -> Latencies:
    times, n = [e.at_s for e, d in stream.events if d.text or d.reasoning], len(stream.tokens)
    if not times:
        return Latencies(None, ())
    return Latencies(times[0], ((times[-1] - times[0]) / (n - 1),) if n > 1 else ())


def _inference_perf(stream: Stream) -> Latencies:
    times, n = [e.at_s for e, d in stream.events if d.text], len(stream.tokens)
    if not times:
        return Latencies(None, ())
    each = tuple(b.at_s - a.at_s for a, b in pairwise(stream.tokens))
    return Latencies(times[0], each, (times[-1] - times[0]) / (n - 1) if n > 1 else None)


def _llmperf(stream: Stream) -> Latencies:
    times, n = [e.at_s for e, d in stream.events if d.text], len(stream.tokens)
    return Latencies(times[0], (times[-1] / n,)) if times and n else Latencies(None, ())


def _tgi(stream: Stream) -> Latencies:
    n, last = len(stream.tokens), stream.last_token_s
    return Latencies(None, (), last / n if last is not None and n else None)


def _labkit(stream: Stream) -> Latencies:
    return Latencies(stream.first_token_s, tuple(stream.itl_s), stream.tpot_s)


CONVENTIONS = (
    Convention("vllm bench serve", "TTFT: the first event, the role chunk too. ITL: from event to event.", _vllm),
    Convention("guidellm", "ITL: one mean a request. TPOT: whole time over tokens, TTFT included.", _guidellm),
    Convention("AIPerf", "TTFT: first text or reasoning. ITL: one mean a request.", _aiperf),
    Convention(
        "inference-perf", "TTFT: first text of the answer. ITL: a token each, 0 inside an event.", _inference_perf
    ),
    Convention("llmperf", "ITL: all gaps over tokens, the first (TTFT) included.", _llmperf),
    Convention("TGI (its log)", "time_per_token: inference time over tokens, prefill included.", _tgi),
    Convention("labkit", "TTFT: first token. ITL: a token each, spread over the gap its event ended.", _labkit),
)


def rows(stream: Stream) -> list[dict[str, Any]]:
    """A table: one row a tool, milliseconds. Raises ValueError when the recording has no times or no token."""
    if not stream.recording.timed:
        raise ValueError("this recording has no times, so no tool could report a latency of it.")
    if not stream.tokens:
        raise ValueError(f"no token came, so there is no latency to compare ({stream.error or 'no error was given'}).")
    found = []
    for each in CONVENTIONS:
        seen = each.of(stream)
        itl = list(seen.itl_s)
        found.append(
            {
                "tool": each.tool,
                "TTFT ms": _ms(seen.ttft_s),
                "ITL mean ms": _ms(sum(itl) / len(itl) if itl else None),
                "ITL p99 ms": _ms(quantile(itl, 0.99) if itl else None),
                "TPOT ms": _ms(seen.tpot_s),
                "what it counts": each.says,
            }
        )
    return found


def spread(stream: Stream) -> str:
    """The sentence to the table: how far apart the same stream's figures lie."""
    table = rows(stream)
    parts = []
    for column, words in (("TTFT ms", "TTFT"), ("ITL mean ms", "mean ITL"), ("ITL p99 ms", "ITL p99")):
        values = [row[column] for row in table if row[column]]
        if values:
            low, high = min(values), max(values)
            parts.append(
                f"{words} {low:,.1f} ms" if high - low < 0.05 else f"{words} from {low:,.1f} to {high:,.1f} ms"
            )
    return "The same bytes, by the tools' own definitions: " + ", ".join(parts) + "."


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
