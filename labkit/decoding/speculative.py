"""Speculative decoding: several tokens for one pass over the target's weights, and the output provably unchanged.

    draft    d_1 ... d_n           guessed by something cheap
    verify   p_0 ... p_n           one step of the target over [last, d_1 ... d_n]: what follows each of them
    accept   d_i while it holds    then one token of the target's own: so a round yields 1 to n + 1 tokens

Where d_i was drawn from q_i, it is accepted with chance min(1, p_i(d_i) / q_i(d_i)); at the first rejection a token
is drawn from max(0, p_i - q_i), divided by its sum. What comes out is distributed as p (Leviathan et al., arXiv
2211.17192, appendix A.1; Chen et al., arXiv 2302.01318).

A guess that was chosen and not drawn is a q of one token. Then all this is to draw from p and to look whether the draw
is d_i, which is what is done: a seed gives the very tokens that plain decoding gives.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from labkit.decoding.draft_length import AutomaticLength, FixedLength
from labkit.decoding.drafters import AUTOMATIC, Draft, Drafter
from labkit.decoding.sampler import Sampler


@dataclass(frozen=True)
class Round:
    """``proposed``: the draft. ``tokens``: what the round yields, accepted guesses and one more of the target's own."""

    proposed: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def n_accepted(self) -> int:
        return len(self.tokens) - 1


def verify(logits: Tensor, draft: Draft, sampler: Sampler) -> list[int]:
    """The tokens that a draft of n yields, given the target's logits (n + 1, V): after the last known token and after
    each guess. The sampler remembers those tokens alone."""
    tokens = []
    for idx, guess in enumerate(draft.token_ids):
        if draft.chances is None:
            token_id = sampler(logits[idx])
        else:
            token_id = sampler.weigh(logits[idx], guess, draft.chances[idx])
        tokens.append(token_id)
        if token_id != guess:
            return tokens
    tokens.append(sampler(logits[len(draft.token_ids)]))
    return tokens


class Speculation:
    """The drafts of one text: who guesses, how many, and what became of them.

    A round is ``propose``, the target's step over the text's end and the guesses, ``settle``, and, where the drafter
    reads hidden states, ``see``. A run that is stopped in between leaves nothing to mend: a drafter is told the text
    each time, and guesses in the target's cache lie behind what counts."""

    def __init__(self, drafter: Drafter, *, capacity_tokens: int, backend: Any) -> None:
        self.drafting = drafter.begin(capacity_tokens=capacity_tokens, backend=backend)
        self.wants_hidden = drafter.wants_hidden
        self.length: Any = AutomaticLength() if drafter.n_draft == AUTOMATIC else FixedLength(drafter.n_draft)
        self.rounds: list[Round] = []
        self._draft, self._draft_s = Draft([]), 0.0
        self._proposed_at: float | None = None

    def propose(self, ids: Sequence[int], room: int, sampler: Sampler, *, timer: Any, should_stop: Any) -> list[int]:
        """Guesses at what follows ``ids``, the whole text; at most ``room``: those that could be used."""
        began = time.perf_counter()
        n = self.length.choose(room)
        self._draft = Draft([])
        if n > 0:
            with timer.only("draft"):
                self._draft = self.drafting.propose(ids, n, sampler, timer=timer, should_stop=should_stop)
        self._proposed_at = time.perf_counter()
        self._draft_s = self._proposed_at - began
        return self._draft.token_ids

    def drop(self) -> None:
        """There is no room for the guesses: the round goes without."""
        self._draft = Draft([])

    def settle(self, logits: Tensor, sampler: Sampler) -> list[int]:
        """The round's tokens, from the target's logits (n + 1, V) after the text and after each guess."""
        return self._close(verify(logits, self._draft, sampler))

    def settle_choice(self, token_id: int) -> list[int]:
        """The same for a round without guesses, whose step has chosen the token itself."""
        return self._close([token_id])

    def _close(self, tokens: list[int]) -> list[int]:
        guesses, self._draft = self._draft.token_ids, Draft([])
        self.rounds.append(Round(tuple(guesses), tuple(tokens)))
        if self._proposed_at is not None:  # a step that nobody was asked to guess for says nothing of a round's time
            took, self._proposed_at = time.perf_counter() - self._proposed_at, None
            self.length.learn(len(guesses), len(tokens) - 1, draft_s=self._draft_s, verify_s=took)
        return tokens

    def see(self, hidden: Tensor) -> None:
        """The target's states (T, M) behind the tokens that the round has left in its cache, oldest first."""
        self.drafting.see(hidden)

    @property
    def record(self) -> dict[str, Any]:
        """For a trace: each round's guesses, and how many of them held."""
        rounds = list(self.rounds)
        return {
            "n_proposed": sum(len(r.proposed) for r in rounds),
            "n_accepted": sum(r.n_accepted for r in rounds),
            "rounds": [
                {"proposed": list(r.proposed), "n_accepted": r.n_accepted, "tokens": list(r.tokens)} for r in rounds
            ],
            "nbytes": self.drafting.nbytes,
        }
