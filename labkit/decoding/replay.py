"""What drafters would have guessed of a text that is there already: greedy decoding would have taken the same guesses.

A lookup in the text itself costs a few milliseconds. A drafter that computes does so here too, round by round; one that
reads the target's hidden states gets them from one pass of the target over the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit import backends
from labkit.decoding.drafters import Drafter, Lookup, choose
from labkit.decoding.sampler import Sampler
from labkit.decoding.sampling import Sampling
from labkit.kvcache.contiguous import ContiguousCache
from labkit.perf.timer import NULL_TIMER

LENGTHS = (1, 2, 3, 4, 6, 8)
COMPUTED_LENGTHS = (1, 2, 4)
"""Of drafters that compute their guesses, which takes time here as well."""
DRAFTERS = ("prompt-lookup", "trained-head")
"""Those that a model has from the start: no second model to be named, no copy of the weights to be made. Early exit is
one, too, but its guesses cost half a step and more: a replay would take as long as the run, to say that it loses."""
LONGEST_TOKENS = 1024
"""Of a longer text only the lookup is replayed: the others' pass over it would take as long as the run."""


class Replay(NamedTuple):
    """``rounds``: guesses, and tokens that the round yields. ``guess_s``: seconds of one guess, measured."""

    drafter: str
    n_draft: int
    rounds: tuple[tuple[int, int], ...]
    guess_s: float


def replays(
    model: Any,
    token_ids: Sequence[int],
    n_prompt: int,
    *,
    backend: Any = "auto",
    names: Sequence[str] = DRAFTERS,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Replay]:
    """Each drafter that ``model`` can have from the start, over ``token_ids``, the first ``n_prompt`` of them the
    prompt. Left out is what does not fit the model, and where ``should_stop`` says so, what is still to come."""
    found: list[Replay] = []
    for name in names:
        try:
            drafter = choose(name, target=model)
        except (ValueError, FileNotFoundError):
            continue  # no head was trained for this model, say
        if should_stop() or not (isinstance(drafter, Lookup) or len(token_ids) <= LONGEST_TOKENS):
            continue
        found += replay(model, token_ids, n_prompt, drafter, backend=backend)
    return found


def replay(model: Any, token_ids: Sequence[int], n_prompt: int, choice: Any, *, backend: Any = "auto") -> list[Replay]:
    """One ``Replay`` for each length of a drafter (as ``choose`` takes it), or its own length's. The first token of the
    answer is the prefill's."""
    ids, drafter = list(token_ids), choose(choice, target=model)
    if len(ids) <= n_prompt + 1:
        return []
    backend = model.backend if backend == "auto" else backend
    states = _states(model, ids, backend) if drafter.wants_hidden else None
    own = (drafter.n_draft,) if drafter.n_draft else LENGTHS if isinstance(drafter, Lookup) else COMPUTED_LENGTHS
    return [_at_length(ids, n_prompt + 1, drafter, n, backend, states) for n in own]


@torch.inference_mode()
def _states(model: Any, ids: list[int], backend: Any) -> Tensor:
    """The target's hidden states (T, M) after each token."""
    entries = model.transformer.cache_entries
    cache = ContiguousCache(entries, capacity_tokens=len(ids), dtype=model.dtype, device=model.device)
    _, step = backends.bind(backend, transformer=model.transformer, cache=cache, keep_hidden=True)
    step(torch.tensor(ids), rows="all", timer=NULL_TIMER, should_stop=lambda: False)
    assert step.hidden is not None
    return step.hidden


@torch.inference_mode()
def _at_length(
    ids: list[int], n_known: int, drafter: Drafter, n_draft: int, backend: Any, states: Tensor | None
) -> Replay:
    drafting = drafter.begin(capacity_tokens=len(ids) + n_draft, backend=backend)
    sampler = Sampler(Sampling(temperature=0.0), seed=0, device="cpu")
    rounds, n_guesses, began = [], 0, time.perf_counter()
    if states is not None:
        drafting.see(states[n_known - 2 : n_known - 1])
    while n_known < len(ids):
        room = min(n_draft, len(ids) - n_known - 1)
        found: list[int] = []
        if room > 0:
            draft = drafting.propose(ids[:n_known], room, sampler, timer=NULL_TIMER, should_stop=lambda: False)
            found = draft.token_ids
        held = 0
        while held < len(found) and found[held] == ids[n_known + held]:
            held += 1
        if states is not None:
            drafting.see(states[n_known - 1 : n_known + held])
        rounds.append((len(found), held + 1))
        n_guesses += len(found)
        n_known += held + 1
    return Replay(drafter.name, n_draft, tuple(rounds), (time.perf_counter() - began) / max(1, n_guesses))
