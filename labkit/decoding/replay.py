"""What a drafter would have guessed of a text that is there already: greedy decoding would have taken the same guesses.

Only a lookup in the text itself can be replayed without a model; it costs a few milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from labkit.decoding.drafters import Lookup, PromptLookup
from labkit.decoding.sampler import Sampler
from labkit.decoding.sampling import Sampling
from labkit.perf.timer import NULL_TIMER

LENGTHS = (1, 2, 3, 4, 6, 8)


class Replay(NamedTuple):
    """``rounds``: guesses, and tokens that the round yields. ``guess_s``: seconds of one guess, measured."""

    n_draft: int
    rounds: tuple[tuple[int, int], ...]
    guess_s: float


def replay(token_ids: Sequence[int], n_prompt: int, config: PromptLookup | None = None) -> list[Replay]:
    """Lookups over ``token_ids``, the first ``n_prompt`` of them the prompt: one ``Replay`` for each length, or the
    config's own. The first token of the answer is the prefill's."""
    config = config or PromptLookup()
    lengths = (config.n_draft,) if config.n_draft else LENGTHS
    return [_at_length(list(token_ids), n_prompt + 1, config, n) for n in lengths if len(token_ids) > n_prompt + 1]


def _at_length(ids: list[int], n_known: int, config: PromptLookup, n_draft: int) -> Replay:
    drafting = Lookup(config).begin(capacity_tokens=len(ids), backend=None)
    sampler = Sampler(Sampling(), seed=0, device="cpu")
    rounds, n_guesses, began = [], 0, time.perf_counter()
    while n_known < len(ids):
        room = min(n_draft, len(ids) - n_known - 1)
        found = drafting.propose(ids[:n_known], room, sampler, timer=NULL_TIMER, should_stop=lambda: False).token_ids
        held = 0
        while held < len(found) and found[held] == ids[n_known + held]:
            held += 1
        rounds.append((len(found), held + 1))
        n_guesses += len(found)
        n_known += held + 1
    return Replay(n_draft, tuple(rounds), (time.perf_counter() - began) / max(1, n_guesses))
