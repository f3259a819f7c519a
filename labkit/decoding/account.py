"""What drafting was worth: a run's own acceptance and costs, the speed-up that they predict, and the one measured."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.decoding.draft_length import expected_tokens
from labkit.perf.trace import Trace


@dataclass(frozen=True)
class Account:
    """Of one run with a drafter, beside plain decoding. Costs are in plain steps."""

    sizes: tuple[int, ...]
    """Guesses of each round."""
    acceptance: float
    """Chance that a guess holds, those before it in its round having held; 0 where nothing was guessed."""
    tokens_per_round: float
    draft_cost: float
    """Of one guess."""
    verify_cost: float
    """Of a round's check, sampling and bookkeeping included."""
    measured: float
    """Speed-up: times a token, plain over drafted."""

    @property
    def guesses_per_round(self) -> float:
        return sum(self.sizes) / len(self.sizes)

    @property
    def predicted(self) -> float:
        """Speed-up by the formula, from the acceptance and the costs."""
        return self.speedup(self.acceptance)

    def speedup(self, acceptance: float) -> float:
        """By the formula, had guesses held as often as ``acceptance``."""
        earned = sum(expected_tokens(acceptance, n) for n in self.sizes) / len(self.sizes)
        return earned / (self.verify_cost + self.guesses_per_round * self.draft_cost)

    @property
    def break_even(self) -> float | None:
        """The acceptance at which these costs are just earned; None where even certain guesses would not earn them."""
        if self.speedup(1.0) < 1.0:
            return None
        low, high = 0.0, 1.0
        while high - low > 1e-4:
            middle = (low + high) / 2
            low, high = (middle, high) if self.speedup(middle) < 1.0 else (low, middle)
        return high


def account(trace: Trace, plain_s: float) -> Account:
    """``trace`` of a run with a drafter; ``plain_s`` seconds a token of plain decoding, of the same text.

    Raises ValueError for a trace without a drafter, or with no round in it."""
    record = trace.meta.get("speculation")
    if not record or not record["rounds"]:
        raise ValueError("this run decoded no token with a drafter: there is nothing to account for.")
    rounds = record["rounds"]
    sizes = [len(r["proposed"]) for r in rounds]
    tried = sum(min(r["n_accepted"] + 1, n) for r, n in zip(rounds, sizes, strict=True))
    acceptance = record["n_accepted"] / tried if tried else 0.0
    decode = trace.stage_phases("decode")
    draft_s = decode.get("draft", 0.0)
    check_s = trace.stage_s("decode") - draft_s
    draft_cost = draft_s / plain_s / max(1, sum(sizes))
    verify_cost = check_s / plain_s / len(rounds)
    took = sum(trace.itl_s) / max(1, len(trace.itl_s))
    return Account(
        tuple(sizes),
        acceptance,
        (record["n_accepted"] + len(rounds)) / len(rounds),
        draft_cost,
        verify_cost,
        plain_s / took if took else 0.0,
    )
