"""Lesson 04, the pipeline timed: the exercise. Its panel is the switchboard."""

from __future__ import annotations

from labkit.perf.trace import Trace
from labkit.ui.exercise import Exercise


def _itl_s(token_s: list[float]) -> list[float]:
    """What ``Trace.itl_s`` says of tokens that came at these times."""
    return Trace((), tuple(token_s), token_s[-1]).itl_s


def _close(found: list[float], expected: list[float]) -> bool:
    return len(found) == len(expected) and all(abs(a - b) < 1e-9 for a, b in zip(found, expected, strict=True))


INTER_TOKEN_LATENCY = Exercise(
    "inter-token latency",
    cases=[([0.30, 0.35, 0.41, 0.46],), ([1.5, 1.75],), ([0.2],)],
    oracle=_itl_s,
    same=_close,
    hints=(
        "A latency lies *between* two tokens, so four tokens have three of them, and one token has none.",
        "`zip(token_s, token_s[1:])` pairs every time with the one after it.",
        "`[later - earlier for earlier, later in zip(token_s, token_s[1:])]`",
    ),
)
