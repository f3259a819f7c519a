"""Drafts by a trained head on the target's hidden states (``draft_head``).

One for the default model is looked for in the package's data and where the training scripts put theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.decoding import compiled_head, draft_head
from labkit.decoding.drafters import AUTOMATIC, LONGEST, Draft, Drafter, Drafting
from labkit.decoding.sampler import Sampler
from labkit.kvcache.contiguous import ContiguousCache
from labkit.registry import option, register
from labkit.resources import cache_folder, data_path

HEAD_FILE = "smollm2-135m-instruct.safetensors"


@dataclass(frozen=True)
class TrainedHead:
    """``path``: a head written by ``training/draft_head.py``; "" is the default model's (``own_head``)."""

    path: str = ""
    n_draft: int = option(AUTOMATIC, low=0, high=LONGEST, step=1, help="tokens a round; 0 chooses as it goes")


class PlainSteps:
    """One run's steps of a head in plain PyTorch, on any device; ``compiled_head.CompiledSteps`` are faster ones."""

    def __init__(self, head: draft_head.DraftHead, target: Any, cache: ContiguousCache) -> None:
        self._head, self._target, self._cache = head, target, cache
        self._states = torch.empty(0)

    def start(self, hidden: Tensor) -> None:
        self._states = self._target.transformer.final_norm(hidden.to(self._target.dtype)).float()

    def __call__(self, token_ids: list[int], *, timer: Any, should_stop: Any) -> Tensor:
        embedded = draft_head.embeddings(self._target.transformer, torch.tensor(token_ids))
        self._states = self._head(self._states, embedded, self._cache)[-1:]
        return self._head.trunk.logits(self._states)[0]


class _Guessing:
    """One run's guesses. Its cache holds the answer's tokens that the target has seen, and its own guesses behind."""

    def __init__(self, drafter: HeadDrafter, capacity_tokens: int, backend: Any) -> None:
        self.head, self.target = drafter.head, drafter.target
        self.cache = ContiguousCache(
            self.head.trunk.cache_entries, capacity_tokens=capacity_tokens, device=self.target.device
        )
        self.nbytes = self.cache.nbytes
        compiled = drafter.compiled()
        steps = None if compiled is None else compiled_head.bind(compiled, self.cache, backend)
        self.step = steps or PlainSteps(self.head, self.target, self.cache)
        self._ids = self.head.token_ids.tolist()
        self._n_true = 0
        self._seen: list[Tensor] = []

    def see(self, hidden: Tensor) -> None:
        self._seen.append(hidden)

    def propose(self, token_ids: Sequence[int], n: int, sampler: Sampler, *, timer: Any, should_stop: Any) -> Draft:
        if not self._seen:
            return Draft([])
        hidden = torch.cat(self._seen)
        feed = list(token_ids[-len(hidden) :])
        if self.cache.n_tokens() > self._n_true:
            self.cache.truncate(self._n_true)
        self._seen.clear()
        self._n_true += len(feed)
        self.step.start(hidden)
        guesses: list[int] = []
        chances: list[np.ndarray] | None = [] if sampler.draws else None
        with sampler.aside():
            while True:
                logits = self.step(feed, timer=timer, should_stop=should_stop)
                if chances is not None:
                    token_id, drawn_from = sampler.draw(self._spread(logits))
                    chances.append(drawn_from)
                elif sampler.takes_largest:
                    token_id = self._ids[int(logits.argmax())]
                else:
                    token_id = sampler(self._spread(logits))
                guesses.append(token_id)
                if len(guesses) == n or should_stop():
                    return Draft(guesses, chances)
                feed = [token_id]

    def _spread(self, logits: Tensor) -> Tensor:
        """Logits of the draft's ids (N,) among all of the target's (V,): the others cannot be drawn."""
        spread = logits.new_full((self.target.config.vocab_size,), float("-inf"))
        spread[self.head.token_ids] = logits
        return spread


class HeadDrafter:
    name = "trained-head"
    wants_hidden = True

    def __init__(self, head: draft_head.DraftHead, target: Any, n_draft: int) -> None:
        self.head, self.target, self.n_draft = head, target, n_draft
        self.nbytes = sum(p.nbytes for p in head.parameters())
        self._compiled: compiled_head.CompiledHead | None = None

    def compiled(self) -> compiled_head.CompiledHead | None:
        """The head for the compiled step, made when first asked for; None where the target is on another device."""
        if self._compiled is None and self.target.device.type == "cpu":
            self._compiled = compiled_head.CompiledHead(self.head, self.target)
        return self._compiled

    def begin(self, *, capacity_tokens: int, backend: Any) -> Drafting:
        return _Guessing(self, capacity_tokens, backend)


def own_head() -> Path:
    """The default model's head: the package's, else the one that was trained on this machine (it may not exist)."""
    try:
        return data_path("draft", HEAD_FILE)
    except FileNotFoundError:
        return cache_folder() / "draft" / HEAD_FILE


@register("drafter", "trained-head", config=TrainedHead, summary="A small trained layer on the target's hidden states")
def trained_head(config: TrainedHead, *, target: Any) -> Drafter:
    path = Path(config.path).expanduser() if config.path else own_head()
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file {path}, so there is no trained head yet. In a clone, training/draft_answers.py and then "
            "training/draft_head.py make one (about an hour each on two idle cores)."
        )
    drafter = HeadDrafter(draft_head.load(path, target), target, config.n_draft)
    drafter.compiled()  # now, and not within the first run's time
    return drafter
