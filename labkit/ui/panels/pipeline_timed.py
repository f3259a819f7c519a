"""Lesson 04, the pipeline timed: one switch measured in turn, the exercise, the quiz. Its panel is the switchboard."""

from __future__ import annotations

from statistics import median
from typing import Any

from labkit.perf.trace import Trace
from labkit.prompts import ready_prompts
from labkit.run import Completion
from labkit.ui.compare import Comparison, in_turn
from labkit.ui.exercise import Exercise

LONGER = 1.15
"""A first token that takes this many times as long counts as slower."""


def cache_in_turn(lab: Any, *, n_tokens: int = 16) -> Comparison:
    """A story's next tokens with and without a cache, three times each, in turn: the median time per token, ms."""
    story = next(prompt.text for prompt in ready_prompts() if prompt.name == "story")

    def one(kind: str) -> float:
        run = lab.pipeline(kv_cache=kind).generate(story, max_new_tokens=n_tokens, ignore_eos=True)
        return median(run.trace.itl_s) * 1e3

    return in_turn({kind: lambda kind=kind: one(kind) for kind in ("contiguous", "none")}, unit="ms a token")


def outcome(with_cache: Completion, without: Completion, turns: Comparison) -> str | None:
    """Which of the lesson's guesses came true; None when none of them did."""
    same = with_cache.token_ids == without.token_ids
    if turns.clear and turns.ratio > 1:
        return "Same text, each token takes longer" if same else "Other text, each token takes longer"
    first, other = (run.trace.ttft_s or 0.0 for run in (with_cache, without))
    if same and other > LONGER * first:
        return "Same text, only the first token takes longer"
    return None


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

QUIZ = (
    (
        "Which part of a run does the KV cache speed up?",
        {
            "Prefill": "No. In the prefill every key and value has to be computed once, cache or not.",
            "Decode": "Yes: each step computes one token's keys and values, and reads the others back.",
            "Both alike": "No. The first token comes equally late; the ones after it come faster.",
        },
        "Decode",
    ),
    (
        "Two runs with equal switches differ by 6 % in tokens per second. What do you conclude?",
        {
            "The second run is faster": "Not yet: nothing was changed, so the 6 % are the machine's noise.",
            "6 % is the noise here": "Yes. A switch has to move a figure by more than this to mean anything.",
        },
        "6 % is the noise here",
    ),
    (
        "The segments of a bar are *exclusive*. What does that buy?",
        {
            "They add up to the whole": "Yes: no millisecond counts twice, so what is missing shows as 'in no phase'.",
            "They are faster to measure": "No: exclusive or not, each phase switch costs one look at the clock.",
        },
        "They add up to the whole",
    ),
)
