"""What a number of served requests came to: latencies by their several conventions, throughput, goodput, waste.

``TPOT`` is counted in two ways in the field: (end - first token) / (n - 1), as vLLM does, or end / n with the time to
the first token in it, as others do. ITL is one value a gap, pooled over requests; a mean for each request hides stalls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from labkit.perf.trace import quantile
from labkit.serving.request import Request
from labkit.serving.service import Moment

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True)
class Timing:
    """One finished request: seconds since its arrival."""

    queue_s: float
    ttft_s: float | None
    itl_s: tuple[float, ...]
    e2e_s: float
    n_prompt: int
    n_tokens: int
    cancelled: bool = False

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None with fewer than two."""
        return sum(self.itl_s) / len(self.itl_s) if self.itl_s else None

    @property
    def tpot_with_ttft_s(self) -> float | None:
        """The other convention: the whole time over the tokens."""
        return self.e2e_s / self.n_tokens if self.n_tokens else None


def timing_of(request: Request) -> Timing:
    token_s = request.sequence.token_s
    ended_s = request.arrived_s if request.ended_s is None else request.ended_s
    started_s = ended_s if request.started_s is None else request.started_s
    return Timing(
        queue_s=started_s - request.arrived_s,
        ttft_s=token_s[0] if token_s else None,
        itl_s=tuple(b - a for a, b in pairwise(token_s)),
        e2e_s=ended_s - request.arrived_s,
        n_prompt=request.sequence.n_prompt,
        n_tokens=len(token_s),
        cancelled=request.sequence.finish_reason == "cancelled",
    )


@dataclass(frozen=True)
class Figures:
    """Of all requests together. Each of the latencies is {"p50": s, "p95": s, "p99": s}, empty where there is none."""

    n_requests: int
    n_cancelled: int
    n_tokens: int
    wall_s: float
    ttft_s: dict[str, float]
    itl_s: dict[str, float]
    tpot_s: dict[str, float]
    tpot_with_ttft_s: dict[str, float]
    e2e_s: dict[str, float]
    queue_s: dict[str, float]
    goodput_per_s: float | None
    """Requests a second that kept to both limits; None where no limit was given."""

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.wall_s if self.wall_s else 0.0

    @property
    def requests_per_s(self) -> float:
        return (self.n_requests - self.n_cancelled) / self.wall_s if self.wall_s else 0.0


def figures(
    timings: Sequence[Timing], wall_s: float, *, ttft_limit_s: float | None = None, itl_limit_s: float | None = None
) -> Figures:
    """``wall_s``: from the first arrival to the last end. A request is good when its TTFT and its p99 ITL are within
    the limits (goodput: arXiv 2401.09670)."""
    whole = [timing for timing in timings if not timing.cancelled]
    limited = ttft_limit_s is not None or itl_limit_s is not None
    n_good = sum(_is_good(timing, ttft_limit_s, itl_limit_s) for timing in whole)
    return Figures(
        n_requests=len(timings),
        n_cancelled=len(timings) - len(whole),
        n_tokens=sum(timing.n_tokens for timing in timings),
        wall_s=wall_s,
        ttft_s=_quantiles(timing.ttft_s for timing in whole),
        itl_s=_quantiles(gap for timing in whole for gap in timing.itl_s),
        tpot_s=_quantiles(timing.tpot_s for timing in whole),
        tpot_with_ttft_s=_quantiles(timing.tpot_with_ttft_s for timing in whole),
        e2e_s=_quantiles(timing.e2e_s for timing in whole),
        queue_s=_quantiles(timing.queue_s for timing in whole),
        goodput_per_s=n_good / wall_s if limited and wall_s else None,
    )


def figures_of(requests: Sequence[Request], **limits: float | None) -> Figures:
    """``figures`` of finished requests of a service, in this process."""
    began = min((request.arrived_s for request in requests), default=0.0)
    ended = max((request.ended_s or 0.0 for request in requests), default=0.0)
    return figures([timing_of(request) for request in requests], max(0.0, ended - began), **limits)


def waste(moments: Iterable[Moment]) -> float | None:
    """Share of the token places set aside for requests that held none, over time; None where nothing ran.

    The PagedAttention paper (arXiv 2309.06180) found 20 to 38 % in use in systems that reserve for the longest answer.
    """
    held = reserved = 0.0
    for moment in moments:
        took_s = moment.end_s - moment.start_s
        held, reserved = held + moment.held_tokens * took_s, reserved + moment.reserved_tokens * took_s
    return 1 - held / reserved if reserved else None


def gantt(requests: Sequence[Request]) -> list[dict[str, Any]]:
    """One row a slice of each request's life: request, kind, start_s, end_s, n_tokens; for a chart or a data frame."""
    origin = min((request.arrived_s for request in requests), default=0.0)
    return [
        {
            "request": request.request_id,
            "kind": piece.kind,
            "start_s": piece.start_s - origin,
            "end_s": piece.end_s - origin,
            "n_tokens": piece.n_tokens,
        }
        for request in requests
        for piece in list(request.slices)
    ]


def _is_good(timing: Timing, ttft_limit_s: float | None, itl_limit_s: float | None) -> bool:
    if timing.ttft_s is None or (ttft_limit_s is not None and timing.ttft_s > ttft_limit_s):
        return False
    return itl_limit_s is None or not timing.itl_s or quantile(list(timing.itl_s), 0.99) <= itl_limit_s


def _quantiles(values: Iterable[float | None]) -> dict[str, float]:
    known = [value for value in values if value is not None]
    return {name: quantile(known, q) for name, q in QUANTILES.items()} if known else {}
