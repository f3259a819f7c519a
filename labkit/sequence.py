"""One text under way: its tokens, how its next one is chosen, when it ends, and what its reader has of it so far."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torch import Tensor

from labkit import registry
from labkit.decoding import Sampler, Sampling, Speculation, StopStrings
from labkit.model.config import dtype_name
from labkit.model.model import Model
from labkit.perf.trace import Trace
from labkit.run import Completion


class Sequence:
    """Prompt and answer of one request. Whoever computes (``Engine.step``) chooses and ``accept``s tokens; whoever
    reads holds a ``Run`` on it. Its state is its own, so an interrupted run leaves nothing behind.

    ``timer`` is the clock that its times are read from: its own, or an engine's that it shares; ``began_s`` is its
    zero there. ``continues``: the answer goes on from the prompt's last word; a chat's is a text of its own. Raises
    ValueError for a prompt longer than the context, or ``max_new_tokens`` below 1."""

    def __init__(
        self,
        model: Model,
        prompt_ids: Listed[int],
        *,
        timer: Any,
        sequence_id: int = 0,
        sampling: Sampling | None = None,
        seed: int = 0,
        max_new_tokens: int = 128,
        stop: Listed[str] = (),
        ignore_eos: bool = False,
        continues: bool = True,
        n_logprobs: int | None = None,
        began_s: float = 0.0,
    ) -> None:
        check_max_new_tokens(max_new_tokens)
        if not isinstance(seed, Integral):
            raise ValueError(f"seed={seed!r}: must be a whole number.")
        self.n_prompt, room = len(prompt_ids), model.config.context_tokens
        if not self.n_prompt:
            raise ValueError("the prompt has no tokens: every byte of it is outside the model's vocabulary.")
        if self.n_prompt > room:
            raise ValueError(
                f"the prompt has {self.n_prompt} tokens; the model's context holds {room}: shorten it by "
                f"{self.n_prompt - room}."
            )
        self.sequence_id = sequence_id
        self.ids = list(prompt_ids)
        """Prompt and answer. What of it the cache holds already is the cache's to say."""
        self.max_new_tokens = min(max_new_tokens, room - self.n_prompt + 1)
        sampling = sampling or Sampling()
        self.sampler = Sampler(sampling, seed=seed, device=model.device)
        self.sampler.remember(self.ids)
        self.speculation: Speculation | None = None
        """Its drafts, where the engine has a drafter."""
        self.stop_strings = StopStrings(stop)
        self.eos_ids: Any = frozenset() if ignore_eos else model.tokenizer.eos_ids
        self.stream = model.tokenizer.stream(continues=continues)
        self._hidden_text = model.tokenizer.hidden_text
        self.timer, self.began_s, self.wall_s = timer, began_s, 0.0
        self.token_s: list[float] = []
        self.finish_reason: str | None = None
        self.text: list[str] = []
        self.pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.stop_event, self.ended = threading.Event(), threading.Event()
        self.completion: Completion | None = None
        self.error: BaseException | None = None
        self.n_logprobs = n_logprobs
        """None: no log-probabilities are kept; else how many of the likeliest beside the chosen token's."""
        self.logprobs: list[tuple[float, dict[int, float]]] = []
        """For each token, of the model's own distribution: the chosen one's, and the likeliest by token id."""
        self.on_change: Callable[[], None] | None = None
        """Called by whoever computes, after tokens came and at the end."""
        self.meta: dict[str, Any] = {
            "model": model.name,
            "weights": registry.label("weights", model.weights) if model.weights else dtype_name(model.dtype),
            "dtype": dtype_name(model.dtype),
            "device": str(model.device),
            "sampling": vars(sampling),
            "seed": seed,
        }

    @property
    def token_ids(self) -> list[int]:
        """The answer's tokens so far."""
        return self.ids[self.n_prompt :]

    @property
    def n_new(self) -> int:
        """How many those are."""
        return len(self.ids) - self.n_prompt

    # --- for whoever computes -------------------------------------------------------------------------

    def choose(self, logits: Tensor) -> int:
        """The next token from logits (V,)."""
        token_id = self.sampler(logits)
        if self.n_logprobs is not None:
            likely = logits.float().log_softmax(0)
            top = likely.topk(self.n_logprobs) if self.n_logprobs else None
            tops = {} if top is None else dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            self.logprobs.append((float(likely[token_id]), tops))
        return token_id

    @property
    def takes_largest(self) -> bool:
        """Whether a step may choose the next token itself: nobody asks for more than the most likely one."""
        return self.sampler.takes_largest and self.n_logprobs is None

    def accept(self, token_ids: Iterable[int]) -> int:
        """Append tokens, giving their text to the reader, until one ends the answer; how many were taken. Tokens of one
        call have come together, and have one time."""
        n = 0
        for n, token_id in enumerate(token_ids, 1):  # noqa: B007
            self.finish_reason = self._emit(token_id)
            if self.finish_reason:
                break
        self.token_s += [self.timer.now_s() - self.began_s] * n
        if self.on_change is not None and self.finish_reason is None:
            self.on_change()
        return n

    def _emit(self, token_id: int) -> str | None:
        with self.timer("detokenize"):
            self.ids.append(token_id)
            ends = token_id in self.eos_ids
            if not ends:
                self._write(self.stop_strings.push(self.stream.push(token_id), self._hidden_text(token_id)))
        if ends or self.stop_strings.hit:
            return "stop"
        if self.n_new >= self.max_new_tokens:
            return "length"
        return "cancelled" if self.stop_event.is_set() else None

    def _write(self, piece: str) -> None:
        if piece:
            self.text.append(piece)
            self.pieces.put(piece)

    def finish(self) -> None:
        """Show the text that was held back: no token follows."""
        with self.timer("detokenize"):
            if not self.stop_strings.hit:
                self._write(self.stop_strings.push(self.stream.flush()))
                self._write(self.stop_strings.flush())

    def close(self, trace: Trace | None = None, error: BaseException | None = None) -> None:
        """Tell the reader that this is all: with the trace of what was done, or with what went wrong."""
        if self.ended.is_set():
            return
        if trace is not None and self.finish_reason is not None:
            said, prompt_ids = "".join(self.text), tuple(self.ids[: self.n_prompt])
            self.completion = Completion(said, self.token_ids, self.finish_reason, trace, prompt_ids)
        self.error = error
        self.ended.set()
        self.pieces.put(None)
        if self.on_change is not None:
            self.on_change()


@dataclass(eq=False)
class Feed:
    """What one sequence puts into a step: tokens that the cache has not seen. ``complete``: none remain after it."""

    sequence: Sequence
    token_ids: list[int]
    complete: bool
    n_draft: int = 0
    """How many of the tokens, the last ones, are guesses."""


@dataclass
class Output:
    """Logits (n + 1, V) after the last known token of a feed and after each of its n guesses, and the hidden states
    behind them where a drafter asks for them."""

    logits: Tensor
    hidden: Tensor | None


def check_max_new_tokens(max_new_tokens: Any) -> None:
    """Raise ValueError unless it is a whole number, 1 or more."""
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r}: must be a whole number, 1 or more.")
