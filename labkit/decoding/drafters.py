"""Drafters: who guesses the next tokens, for the target to check them all in one step.

A *drafter* belongs to a pipeline: its weights are loaded once. ``begin`` gives one run its *drafting*, which has the
run's state. It is told the text so far and nothing else; what it guessed wrong it takes back itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from labkit import registry
from labkit.decoding.sampler import Sampler
from labkit.registry import option, register

AUTOMATIC = 0
"""As a draft's length: chosen as the run goes (``draft_length``)."""
LONGEST = 16


@dataclass(frozen=True)
class Draft:
    """Guessed tokens. ``chances``: for each, the distribution (V,) that it was drawn from; None where it was not drawn
    but chosen, which counts as a distribution that holds one token alone."""

    token_ids: list[int]
    chances: list[np.ndarray] | None = None


class Drafting(Protocol):
    """The guesses of one run."""

    nbytes: int
    """What it holds besides the drafter's weights: its cache."""

    def propose(self, token_ids: Sequence[int], n: int, sampler: Sampler, *, timer: Any, should_stop: Any) -> Draft:
        """At most ``n`` guesses at what follows ``token_ids``, the whole text so far: prompt and answer. ``sampler``
        is the target's; it is left as it was, but for its source of chance."""
        ...

    def see(self, hidden: Tensor) -> None:
        """The target's hidden states (T, M) after the latest tokens but one, in order: those that it computed since
        the last call and that stay. Called only where the drafter ``wants_hidden``."""
        ...


class Drafter(Protocol):
    """``backend``: the run's, a name or a ``Backend``, for a model of the drafter's own."""

    name: str
    n_draft: int
    """Tokens a round; AUTOMATIC, 0: as many as pay."""
    nbytes: int
    """Its weights, as far as they are not the target's own."""
    wants_hidden: bool

    def begin(self, *, capacity_tokens: int, backend: Any) -> Drafting: ...


def choose(choice: Any, *, target: Any) -> Drafter:
    """The drafter that ``choice`` (a name, a config, or a drafter that is made already) means for ``target``, a Model.

    Raises ValueError that lists the choices for an unknown name, or says why it does not fit the target."""
    if hasattr(choice, "begin"):
        return choice
    component, config = registry.find("drafter", choice)
    return component.build(config, target=target)


@dataclass(frozen=True)
class PromptLookup:
    n_draft: int = option(AUTOMATIC, low=0, high=LONGEST, step=1, help="tokens a round; 0 chooses as it goes")
    longest: int = option(4, low=1, high=8, step=1, help="latest tokens that are looked up, at most")
    shortest: int = option(2, low=1, high=8, step=1, help="and at least")


class _Lookup:
    """``ends[n]``: the last n tokens, to where they last ended before. Kept up to date token by token, so a guess costs
    a look at a table however long the text is."""

    nbytes = 0

    def __init__(self, config: PromptLookup) -> None:
        self.sizes = range(config.longest, min(config.shortest, config.longest) - 1, -1)
        self._ends: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in self.sizes}
        self._n_known = 0

    def propose(self, token_ids: Sequence[int], n: int, sampler: Sampler, *, timer: Any, should_stop: Any) -> Draft:
        """What followed the latest tokens when they last occurred. A text only grows: the table need not shrink."""
        n_text = len(token_ids)
        for end in range(self._n_known + 1, n_text):  # not n_text itself: it must not find itself
            for size in self.sizes:
                if end >= size:
                    self._ends[size][tuple(token_ids[end - size : end])] = end
        self._n_known = max(self._n_known, n_text - 1)
        for size in self.sizes:
            at = self._ends[size].get(tuple(token_ids[n_text - size :])) if n_text >= size else None
            if at is not None:
                guesses: list[int] = []
                for i in range(at, at + n):  # past the end it goes on copying, from what it has just guessed
                    guesses.append(token_ids[i] if i < n_text else guesses[i - n_text])
                return Draft(guesses)
        return Draft([])

    def see(self, hidden: Tensor) -> None:
        raise AssertionError("a lookup reads no hidden states")


class Lookup:
    """Copies from the text so far (Saxena, "Prompt Lookup Decoding", 2023; LLMA, arXiv 2304.04487)."""

    name = "prompt-lookup"
    nbytes = 0
    wants_hidden = False

    def __init__(self, config: PromptLookup) -> None:
        self.config, self.n_draft = config, config.n_draft

    def begin(self, *, capacity_tokens: int, backend: Any) -> Drafting:
        return _Lookup(self.config)


@register("drafter", "prompt-lookup", config=PromptLookup, summary="Copies what followed the same few tokens before")
def prompt_lookup(config: PromptLookup, *, target: Any) -> Drafter:
    return Lookup(config)
