"""One request as a waterfall: what the client saw, and what the server says of itself, on one axis.

The server gives durations, no moments. Its decode ends when its last token arrives here at the earliest, so its
stretches are laid end to end before that; what is left between the request and the first of them is the way there and
back, and whatever nobody reports.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.diagnose.stream import Stream


@dataclass(frozen=True)
class Bar:
    """``who``: client or server. Seconds since the request began."""

    who: str
    what: str
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Waterfall:
    bars: tuple[Bar, ...]
    outside_s: float | None
    """Client's TTFT less the server's queue and prefill: network, proxies, tokenising, and what is not reported."""
    decode_ratio: float | None
    """Client's time from first to last token over the server's own."""

    @property
    def sentence(self) -> str:
        """The two clocks reconciled, in words."""
        if self.outside_s is None:
            return "The server says nothing of its own times: all bars are the client's."
        first = next((bar for bar in self.bars if bar.what == "first token"), None)
        ttft = first.end_s if first else 0.0
        share = self.outside_s / ttft if ttft else 0.0
        words = [f"Of {ttft * 1e3:,.1f} ms to the first token, the server accounts for all but "
                 f"{self.outside_s * 1e3:,.1f} ms ({share:.0%})."]  # fmt: skip
        if self.decode_ratio is not None:
            words.append(f"Its decode and the stream as seen here agree within {abs(self.decode_ratio - 1):.0%}.")
        if share < -0.1:
            words.append("It claims more than was waited for here: the two do not count the same things.")
        return " ".join(words)

    def rows(self) -> list[dict[str, object]]:
        return [
            {"who": bar.who, "what": bar.what, "from ms": bar.start_s * 1e3, "ms": bar.duration_s * 1e3}
            for bar in self.bars
        ]


def waterfall(stream: Stream) -> Waterfall:
    """Raises ValueError when no token came."""
    first, last = stream.first_token_s, stream.last_token_s
    if first is None or last is None:
        raise ValueError("no token came: there is no waterfall of it.")
    bars, at_s = [], 0.0
    for mark, words in (("connected", "connect"), ("secured", "TLS"), ("sent", "send"), ("headers", "headers")):
        end_s = stream.recording.marks.get(mark)
        if end_s is not None and end_s > at_s:
            bars.append(Bar("client", words, at_s, min(end_s, first)))
            at_s = min(end_s, first)
    bars += [Bar("client", "first token", at_s, first), Bar("client", "further tokens", first, last)]
    told = stream.timings
    queue, prefill, decode = (told.get(f"{name}_ms", 0.0) / 1e3 for name in ("queue", "prompt", "predicted"))
    if "prompt_ms" not in told:
        return Waterfall(tuple(bars), None, None)
    for words, end_s, took in (("decode", last, decode), ("prefill", last - decode, prefill),
                               ("queue", last - decode - prefill, queue)):  # fmt: skip
        if took > 0:
            bars.append(Bar("server", words, max(0.0, end_s - took), max(0.0, end_s)))
    streamed = last - first
    ratio = streamed / decode if decode > 0 and streamed > 0 else None
    return Waterfall(tuple(bars), (stream.ttft_s or first) - queue - prefill, ratio)
