"""The textbook step, for one sequence or many: feed what the cache has not seen, choose the next token, emit it.

    sequence a:  [ . . . . . . . ]  7 tokens, nothing stored      its prefill
    sequence b:  [ . . . ]          3 of 40 tokens not stored     a chunk of a prompt, or a draft to check
    sequence c:  [ . ]              the token it chose last       its decode
                        all of them in one call of the model

Read ``Engine.step`` first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listed
from typing import Any

import numpy as np
import torch

from labkit import backends, registry
from labkit.backends import Step
from labkit.backends.step import Rows
from labkit.decoding import Speculation
from labkit.decoding.drafters import Drafter
from labkit.kvcache.parts import CacheFull
from labkit.model.model import Model
from labkit.model.rope import length_for
from labkit.sequence import Feed, Output, Sequence

PREFILL_CHUNK_TOKENS = {"cpu": 1024}
"""Longest run of prompt tokens in one step, by device type: short enough that Stop is prompt. Elsewhere 8192."""


def _never() -> bool:
    return False


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
        drafter: Drafter | None = None,
    ) -> None:
        self.model, self.timer, self.backend, self.drafter = model, timer, backend, drafter
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
        if len(sequences) == 1 and self.drafter is None and self._step_chooses(sequences[0], should_stop):
            return
        feeds = [self._feed(sequence, limits, should_stop) for sequence in sequences]
        plain = self.drafter is not None and len(feeds) == 1 and not feeds[0].n_draft
        if plain and self._step_chooses(sequences[0], should_stop):
            return
        try:
            outputs = self._forward(feeds, should_stop)
        except CacheFull:
            if not any(feed.n_draft for feed in feeds):
                raise
            outputs = self._forward([self._without_draft(feed) for feed in feeds], should_stop)
        for feed, output in zip(feeds, outputs, strict=True):
            if feed.complete:
                self._take(feed, output)

    def _feed(self, sequence: Sequence, limits: Mapping[int, int] | None, should_stop: Callable[[], bool]) -> Feed:
        """The sequence's tokens that the cache has not seen: the whole prompt at first, then the newest token. Where
        the cache remembers nothing, it is always everything.

        A drafter's guesses go behind them: the step then checks them all at once (``_take``)."""
        with self.timer("kv_cache"):
            n_seen = self.open(sequence)
        unseen = sequence.ids[n_seen:]
        share = len(unseen) if limits is None else limits.get(sequence.sequence_id, len(unseen))
        feed = Feed(sequence, unseen[:share], share >= len(unseen))
        decodes = sequence.n_new and (len(unseen) == 1 or not self.cache.keeps_history)
        decodes = decodes and sequence.n_logprobs is None
        if self.drafter is not None and decodes and feed.complete:
            guesses = self._guess(sequence, should_stop)
            feed.token_ids, feed.n_draft = feed.token_ids + guesses, len(guesses)
        return feed

    def _guess(self, sequence: Sequence, should_stop: Callable[[], bool]) -> list[int]:
        """What the drafter proposes, as far as the answer and the cache have room for it."""
        room = min(sequence.max_new_tokens - sequence.n_new - 1, self.cache.rollback_tokens)
        speculation = self._speculation(sequence)
        return speculation.propose(sequence.ids, room, sequence.sampler, timer=self.timer, should_stop=should_stop)

    def _without_draft(self, feed: Feed) -> Feed:
        """The feed, where there is no room to guess: guesses are worth spare room, and no sequence's place."""
        if feed.n_draft:
            self._speculation(feed.sequence).drop()
            feed.token_ids, feed.n_draft = feed.token_ids[: -feed.n_draft], 0
        return feed

    def _speculation(self, sequence: Sequence) -> Speculation:
        """The sequence's drafts, begun when first asked for."""
        if sequence.speculation is None:
            assert self.drafter is not None
            with self.timer.only("draft"):
                sequence.speculation = Speculation(
                    self.drafter, capacity_tokens=self.capacity_tokens, backend=self.backend
                )
        return sequence.speculation

    def _forward(self, feeds: list[Feed], should_stop: Callable[[], bool]) -> list[Output]:
        """The tokens through the model.

        Guesses need the logits of every row, which a long prompt beside them could not afford: it goes by itself."""
        chunk = PREFILL_CHUNK_TOKENS.get(self.model.device.type, 8192)
        for feed in feeds:
            while len(feed.token_ids) > chunk and self.cache.keeps_history:
                self._compute([(feed.sequence, feed.token_ids[:chunk])], "last", should_stop)
                feed.token_ids = feed.token_ids[chunk:]
        checked = [feed for feed in feeds if feed.n_draft or len(feed.token_ids) == 1]
        if not any(feed.n_draft for feed in feeds):
            checked = []
        others = [feed for feed in feeds if feed not in checked]
        found: list[tuple[Feed, Output]] = []
        if checked:
            with self.timer.only("verify"):
                logits, hidden = self._compute([(f.sequence, f.token_ids) for f in checked], "all", should_stop)
            end = 0
            for feed in checked:
                end += len(feed.token_ids)
                rows = slice(end - feed.n_draft - 1, end)
                found.append((feed, Output(logits[rows], None if hidden is None else hidden[rows])))
        if others:
            logits, hidden = self._compute([(f.sequence, f.token_ids) for f in others], "last", should_stop)
            for row, feed in enumerate(others):
                rows = slice(row, row + 1)
                found.append((feed, Output(logits[rows], None if hidden is None else hidden[rows])))
        return [next(output for other, output in found if other is feed) for feed in feeds]

    def _compute(
        self, parts: list[tuple[Sequence, list[int]]], rows: Rows, should_stop: Callable[[], bool]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One call of the model: logits after each sequence's last token, or after all, and the states behind them."""
        with self.timer("schedule"):  # what the step does in no phase of its own
            with self.timer("embed"):
                token_ids = parts[0][1] if len(parts) == 1 else [token_id for _, ids in parts for token_id in ids]
                ids = torch.from_numpy(np.array(token_ids, np.int64))  # torch.tensor takes 50 us more
            self.timer.steps[-1].n_tokens += len(token_ids)
            only_first = len(parts) == 1 and parts[0][0].sequence_id == 0
            counts = None if only_first else {sequence.sequence_id: len(ids) for sequence, ids in parts}
            assert self.compute is not None
            options = {"timer": self.timer, "should_stop": should_stop}
            logits = self.compute(ids, counts=counts, rows=rows, **options)
            return logits, self.compute.hidden

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
        if self.drafter is not None:
            self._speculation(sequence).settle_choice(token_id)
        self._give(sequence, [token_id], self.compute.hidden)
        return True

    def _take(self, feed: Feed, output: Output) -> None:
        """Choose what follows a feed's last known token. With guesses: those that hold, and the token after them; the
        cache then forgets (``truncate``) those that do not."""
        sequence = feed.sequence
        with self.timer("sample"):
            if self.drafter is None or not sequence.n_new or sequence.n_logprobs is not None:
                token_ids = [sequence.choose(output.logits[0])]
            else:
                token_ids = self._speculation(sequence).settle(output.logits, sequence.sampler)
        if len(token_ids) <= feed.n_draft and self.cache.keeps_history:
            with self.timer("kv_cache"):
                self.cache.truncate(len(sequence.ids) + len(token_ids) - 1, sequence.sequence_id)
        self._give(sequence, token_ids, output.hidden)

    def _give(self, sequence: Sequence, token_ids: list[int], hidden: torch.Tensor | None) -> None:
        """Tokens to the text and its reader; the states before each of them to a drafter that reads them."""
        if hidden is not None:
            with self.timer.only("draft"):
                self._speculation(sequence).see(hidden[: len(token_ids)])
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
            name, self.compute = backends.bind(
                self.backend,
                transformer=model.transformer,
                cache=self.cache,
                keep_hidden=self.drafter is not None and self.drafter.wants_hidden,
            )
        bound = {"kv_cache": component.name, "kv_cache_bytes": self.cache.nbytes, "backend": name}
        used = {"from_token": from_token, "name": component.name, "nbytes": self.cache.nbytes}
        self.meta = self.meta | bound | {"kv_caches": [*self.meta["kv_caches"], used]}

    @property
    def served(self) -> dict[str, Any]:
        """Cache and backend, and who computed the last step if it was another: for a trace."""
        if self.compute is None:
            return self.meta
        served = self.meta | {"computed_by": self.compute.computed_by, "backend_note": self.compute.reason}
        if self.drafter is not None:
            note = "" if self.cache is None else self.cache.rollback_note
            served |= {"drafter": self.drafter.name, "drafter_bytes": self.drafter.nbytes, "drafter_note": note}
        return served
