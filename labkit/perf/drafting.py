"""What drafting would make of a run, before it is run: the guesses of a replay, and a round's time from measured rates.

    round of n guesses   n guesses + one step over n + 1 tokens: their products together, the cache read once
    time a token         all rounds' time / all rounds' tokens

Which guesses hold depends on the text: nothing is forecast without one (``decoding.replay`` reads the last run's).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from labkit.model.config import ModelConfig
from labkit.perf.cost import step_cost
from labkit.perf.forecast import MODEL_ERROR, Estimate, Forecast
from labkit.perf.rates import Rates


@dataclass(frozen=True)
class Outlook:
    """A drafter's rounds on one text."""

    drafter: str
    rounds: Sequence[tuple[int, int]]
    """(guesses, tokens that the round yields) of each."""
    guess_s: float
    """Seconds of one guess."""

    @property
    def acceptance(self) -> float:
        """Chance that a guess holds, those before it in its round having held; 0 where nothing was guessed."""
        tried = sum(min(n_tokens, n) for n, n_tokens in self.rounds)
        return sum(n_tokens - 1 for _, n_tokens in self.rounds) / tried if tried else 0.0


def check_cost(config: ModelConfig, now: Forecast, rates: Rates, n_rows: int) -> float:
    """Time of one decode step over ``n_rows`` tokens of a sequence, in steps of one token."""
    if n_rows == 1:
        return 1.0
    width = config.d_model
    more = rates.weight(width, n_rows).value / rates.weight(width, 1).value - 1.0
    phases = now.decode.phases
    products = sum(phases[name].forecast_s - phases[name].overhead_s for name in ("ffn", "lm_head"))
    attention = phases["attention"]
    work = attention.forecast_s - attention.overhead_s
    return 1.0 + more * (products + work * (1.0 - _cache_share(config, now))) / now.itl.value


def drafted(config: ModelConfig, now: Forecast, rates: Rates, outlooks: Sequence[Outlook]) -> Forecast:
    """``now`` with its time a token by the best of ``outlooks``, or as it is where none of them gains: an automatic
    length then guesses nothing."""
    times = [now.itl.value]
    for outlook in outlooks:
        spent = sum(
            n * outlook.guess_s + now.itl.value * check_cost(config, now, rates, n + 1) for n, _ in outlook.rounds
        )
        times.append(spent / max(1, sum(n_tokens for _, n_tokens in outlook.rounds)))
    value = min(times)
    by = value / now.itl.value
    low = min(value * (1 - MODEL_ERROR), now.itl.low * by)
    time = Estimate(value, low, max(value * (1 + MODEL_ERROR), now.itl.high * by))
    return replace(now, decode=replace(now.decode, time=time))


def _cache_share(config: ModelConfig, now: Forecast) -> float:
    """Share of the attention phase's bytes that is the cache and not its weights."""
    engine = now.engine
    setting = {"dtype": engine.dtype, "weights": engine.weights, "kv_cache": engine.kv_cache}
    cost = step_cost(config, n_past=now.n_prompt_tokens + now.n_new_tokens // 2, **setting).phases["attention"]
    return cost.kv_read_bytes / cost.bytes
