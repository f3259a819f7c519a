"""The textbook step, for one sequence or many: feed what the cache has not seen, choose the next token, emit it.

    sequence a:  [ . . . . . . . ]  7 tokens, nothing stored      its prefill
    sequence b:  [ . . . ]          3 of 40 tokens not stored     a chunk of a prompt, or a draft to check
    sequence c:  [ . ]              the token it chose last       its decode
                        all of them in one call of the model

Read ``Engine.step`` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from labkit import backends, registry
from labkit.backends import Step
from labkit.model.model import Model
from labkit.model.rope import length_for
from labkit.sequence import Sequence

PREFILL_CHUNK_TOKENS = {"cpu": 1024}
"""Longest run of prompt tokens in one step, by device type: short enough that Stop is prompt. Elsewhere 8192."""


def _never() -> bool:
    return False


@dataclass
class Feed:
    """What one sequence puts into a step: tokens that the cache has not seen. ``complete``: none remain after it."""

    sequence: Sequence
    token_ids: list[int]
    complete: bool


class Engine:
    """A model, a cache with room for ``n_sequences`` of ``capacity_tokens`` each, and who computes.

    Nothing is allocated before the first step. Raises ValueError that lists the choices for an unknown name."""

    def __init__(
        self,
        model: Model,
        *,
        timer: Any,
        capacity_tokens: int,
        n_sequences: int = 1,
        kv_cache: Any = "contiguous",
        backend: Any = "auto",
    ) -> None:
        self.model, self.timer, self.backend = model, timer, backend
        self.capacity_tokens, self.n_sequences = capacity_tokens, n_sequences
        self.cache: Any = None
        self.compute: Step | None = None
        """The backend's step, bound to the cache."""
        self.meta: dict[str, Any] = {"kv_caches": []}
        self._wanted_cache: Any = None
        self._cache_kind: Any = None
        self._ropes = [getattr(layer.attention, "rope", None) for layer in model.config.layers]
        self.use_cache(kv_cache)

    def step(
        self,
        sequences: Listed[Sequence],
        *,
        limits: Mapping[int, int] | None = None,
        should_stop: Callable[[], bool] = _never,
    ) -> None:
        """One more token for each of ``sequences``. ``limits`` {sequence id: tokens} holds a sequence's share of the
        step down; while tokens of it remain unseen, it gets none.

        Raises CacheFull when the tokens do not fit, and Cancelled when ``should_stop`` says so; the cache is then as it
        was before the step."""
        self.prepare(sequences)
        if len(sequences) == 1 and self._step_chooses(sequences[0], should_stop):
            return
        feeds = [self._feed(sequence, limits) for sequence in sequences]
        rows = self._forward(feeds, should_stop)
        for feed in feeds:
            if feed.complete:
                with self.timer("sample"):
                    token_ids = self._next_tokens(feed, rows)
                self._take(feed.sequence, token_ids)
            else:
                next(rows)

    def _feed(self, sequence: Sequence, limits: Mapping[int, int] | None) -> Feed:
        """The sequence's tokens that the cache has not seen: the whole prompt at first, then the newest token. Where
        the cache remembers nothing, it is always everything.

        A drafter's proposals go behind them: the step then checks them all at once (``_next_tokens``)."""
        with self.timer("kv_cache"):
            n_seen = self.open(sequence)
        unseen = sequence.ids[n_seen:]
        share = len(unseen) if limits is None else limits.get(sequence.sequence_id, len(unseen))
        return Feed(sequence, unseen[:share], share >= len(unseen))

    def _forward(self, feeds: list[Feed], should_stop: Callable[[], bool]) -> Iterator[torch.Tensor]:
        """The tokens through the model; logits (V,) after the last of each feed."""
        chunk = PREFILL_CHUNK_TOKENS.get(self.model.device.type, 8192)
        for feed in feeds:
            while len(feed.token_ids) > chunk and self.cache.keeps_history:
                self._compute([(feed.sequence, feed.token_ids[:chunk])], should_stop)
                feed.token_ids = feed.token_ids[chunk:]
        return iter(self._compute([(feed.sequence, feed.token_ids) for feed in feeds], should_stop))

    def _compute(self, parts: list[tuple[Sequence, list[int]]], should_stop: Callable[[], bool]) -> torch.Tensor:
        """One call of the model: logits (n_sequences, V)."""
        with self.timer("schedule"):  # what the step does in no phase of its own
            with self.timer("embed"):
                token_ids = parts[0][1] if len(parts) == 1 else [token_id for _, ids in parts for token_id in ids]
                ids = torch.from_numpy(np.array(token_ids, np.int64))  # torch.tensor takes 50 us more
            self.timer.steps[-1].n_tokens += len(token_ids)
            only_first = len(parts) == 1 and parts[0][0].sequence_id == 0
            counts = None if only_first else {sequence.sequence_id: len(ids) for sequence, ids in parts}
            assert self.compute is not None
            return self.compute(ids, counts=counts, timer=self.timer, should_stop=should_stop)

    def _next_tokens(self, feed: Feed, rows: Iterator[torch.Tensor]) -> list[int]:
        """What follows the feed's last token. With a draft: the proposals that hold, and the token after them; the
        cache then forgets (``truncate``) those that do not."""
        return [feed.sequence.choose(next(rows))]

    def _step_chooses(self, sequence: Sequence, should_stop: Callable[[], bool]) -> bool:
        """Let a step that can find the most likely token itself do so (on a GPU, ahead of the host), where the
        sequence takes that and the cache lacks one token. Whether it did."""
        if self.compute is None or sequence.sequence_id != 0 or not sequence.takes_largest:
            return False
        if self.cache.n_tokens() != len(sequence.ids) - 1 or not sequence.n_new:
            return False
        more = sequence.n_new + 1 < sequence.max_new_tokens
        chosen = self.compute.choose_next(sequence.ids[-1], more=more, timer=self.timer, should_stop=should_stop)
        if chosen is None:
            return False
        self.timer.steps[-1].n_tokens += 1
        with self.timer("sample"):
            token_id = sequence.sampler.accept(chosen())
        self._take(sequence, [token_id])
        return True

    def _take(self, sequence: Sequence, token_ids: list[int]) -> None:
        n_taken = sequence.accept(token_ids)
        self.cache.note(token_ids[:n_taken], sequence.sequence_id)

    def open(self, sequence: Sequence) -> int:
        """How many of the sequence's tokens the cache holds: of a new one, those that another had in common with it."""
        n_seen = self.cache.n_tokens(sequence.sequence_id)
        if not n_seen:
            self.cache.free(sequence.sequence_id)  # of a step that found no room
            n_seen = self.cache.adopt(sequence.ids, sequence.sequence_id)
        return n_seen

    def release(self, sequence: Sequence) -> None:
        """Forget what the cache holds of the sequence: it has ended, or others need the room and it starts over."""
        if self.cache is not None:
            self.cache.free(sequence.sequence_id)

    def prepare(self, sequences: Listed[Sequence] = ()) -> None:
        """Allocate what the first step would, or the first one after ``use_cache``, or after a text has outgrown what
        its keys were turned for."""
        if self._wanted_cache is not None or self._outgrown(sequences):
            self._bind_cache(sequences)

    def use_cache(self, choice: Any) -> None:
        """Ask for another cache from the next step on. May be called from another thread."""
        self._wanted_cache = registry.find("kv_cache", choice)

    def _outgrown(self, sequences: Listed[Sequence]) -> bool:
        """Whether the one text is longer than what the stored keys were turned for: they are then computed again."""
        return bool(sequences and self.cache.turned_for) and self._length(sequences) != self.cache.turned_for

    def _length(self, sequences: Listed[Sequence]) -> int:
        """What a rotation that goes by the text's length goes by; 0 where it is the cache's room, as for several texts
        in one cache."""
        if self.n_sequences > 1 or not sequences:
            return 0
        return length_for(self._ropes, len(sequences[0].ids), self.cache.turned_for if self.cache else 0)

    def _bind_cache(self, sequences: Listed[Sequence]) -> None:
        """Allocate the wanted cache, or another of the kind in use, and bind the backend to it. It is empty: the next
        step feeds it everything."""
        model, from_token = self.model, max((sequence.n_new for sequence in sequences), default=0)
        length, self._cache_kind = self._length(sequences), self._wanted_cache or self._cache_kind
        self._wanted_cache = None
        component, config = self._cache_kind
        with self.timer("kv_cache"):
            self.cache = None  # the former one's memory comes first
            self.cache = component.build(
                config,
                layers=model.transformer.cache_entries,
                capacity_tokens=self.capacity_tokens,
                n_sequences=self.n_sequences,
                device=model.device,
                dtype=model.dtype,
            )
            self.cache.turned_for = length
        with self.timer("schedule"):
            name, self.compute = backends.bind(self.backend, transformer=model.transformer, cache=self.cache)
        bound = {"kv_cache": component.name, "kv_cache_bytes": self.cache.nbytes, "backend": name}
        used = {"from_token": from_token, "name": component.name, "nbytes": self.cache.nbytes}
        self.meta = self.meta | bound | {"kv_caches": [*self.meta["kv_caches"], used]}

    @property
    def served(self) -> dict[str, Any]:
        """Cache and backend, and who computed the last step if it was another: for a trace."""
        if self.compute is None:
            return self.meta
        return self.meta | {"computed_by": self.compute.computed_by, "backend_note": self.compute.reason}
