"""The textbook loop: one prompt in, one token at a time out, every step timed.

    tokenize -> prefill (all prompt tokens at once) -> sample -> [decode one token -> sample] ... -> text

Read ``_Worker.loop`` first: the rest makes it stoppable, streamable and repeatable.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from labkit import registry
from labkit.decoding import Sampler, Sampling, StopStrings
from labkit.kernels import backends
from labkit.model.config import dtype_name
from labkit.model.model import Model
from labkit.model.step import Cancelled
from labkit.perf.cuda_timer import CudaTimer
from labkit.perf.timer import Timer
from labkit.perf.trace import Trace
from labkit.run import Completion, Run

PREFILL_CHUNK_TOKENS = {"cpu": 1024}
"""Longest run of prompt tokens in one step, by device type: short enough that Stop is prompt. Elsewhere 8192."""


class Pipeline:
    """A model with its switches set: which cache, which sampler, which backend.

    >>> pipeline = Pipeline(model, kv_cache="contiguous")          # doctest: +SKIP
    >>> for piece in pipeline.run("The capital of France is"):     # doctest: +SKIP
    ...     print(piece, end="")

    Raises ValueError that lists the choices when a component's name is unknown.
    """

    def __init__(
        self,
        model: Model,
        *,
        kv_cache: Any = "contiguous",
        drafter: Any = None,
        sampling: Any = None,
        backend: Any = "auto",
    ) -> None:
        self.model = model
        self.weights_bytes = model.nbytes
        """Counted here, before the clock of a run starts: it asks every tensor."""
        self.kv_cache = registry.find("kv_cache", kv_cache)
        self.sampling = _as_sampling(sampling)
        if drafter is not None:
            registry.find("drafter", drafter)
        self.backend = model.backend if backend == "auto" else backend
        if self.backend != "auto":
            registry.find("backend", self.backend)

    def run(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 128,
        chat: bool = False,
        seed: int = 0,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> Run:
        """Start generating in a worker thread; iterate the returned ``Run`` for text as it comes.

        ``chat`` wraps the prompt in the model's chat template. ``ignore_eos`` runs to ``max_new_tokens`` whatever
        the model says, for measurements. Raises ValueError at once for an empty prompt, a prompt longer than the
        context, or ``max_new_tokens`` below 1."""
        return Run(self._worker(prompt, max_new_tokens, chat, seed, stop, ignore_eos))

    def generate(self, prompt: str, **options: Any) -> Completion:
        """The same in the foreground. Takes ``run``'s options. Ctrl-C raises KeyboardInterrupt and loses nothing:
        the next run starts clean."""
        # In a thread of its own all the same: an interrupt would otherwise wait until a compiled step has ended.
        return Run(self._worker(**_defaults(prompt, options))).result()

    def _worker(
        self, prompt: str, max_new_tokens: int, chat: bool, seed: int, stop: Sequence[str], ignore_eos: bool
    ) -> _Worker:
        if not isinstance(prompt, str) or not prompt:
            raise ValueError("the prompt is empty: give the model at least one character to continue.")
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens!r}: must be a whole number, 1 or more.")
        worker = _Worker(self, prompt, max_new_tokens, chat, seed, StopStrings(stop), ignore_eos)
        worker.tokenize()
        return worker


class _Worker:
    """One run: its state is its own, so an interrupted run leaves nothing behind."""

    def __init__(
        self,
        pipeline: Pipeline,
        prompt: str,
        max_new_tokens: int,
        chat: bool,
        seed: int,
        stop: StopStrings,
        ignore_eos: bool,
    ) -> None:
        self.pipeline = pipeline
        self.model = pipeline.model
        self.prompt, self.chat, self.seed = prompt, chat, seed
        self.max_new_tokens, self.stop_strings, self.ignore_eos = max_new_tokens, stop, ignore_eos
        self.stop_event = threading.Event()
        self.pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        on_cuda = self.model.device.type == "cuda"
        self.timer: Any = CudaTimer(device=self.model.device) if on_cuda else Timer()
        self.prompt_ids: list[int] = []
        self.token_ids: list[int] = []
        self.token_s: list[float] = []
        self.text: list[str] = []
        self.meta: dict[str, Any] = {}
        self.step: Any = None
        self.wall_s = 0.0
        self.cache: Any = None
        self._wanted_cache: Any = pipeline.kv_cache

    def tokenize(self) -> None:
        """The first phase of the prefill; done before the worker starts, so that a bad prompt fails at the call."""
        timer, model = self.timer, self.model
        timer.begin()
        timer.begin_step("prefill")
        with timer("tokenize"):
            text = self.prompt
            if self.chat:
                text = model.tokenizer.apply_chat_template([{"role": "user", "content": self.prompt}])
            self.prompt_ids = model.tokenizer.encode(text)
        n_prompt, room = len(self.prompt_ids), model.config.context_tokens
        if not n_prompt:
            raise ValueError("the prompt has no tokens: every byte of it is outside the model's vocabulary.")
        if n_prompt > room:
            raise ValueError(
                f"the prompt has {n_prompt} tokens; the model's context holds {room}: shorten it by {n_prompt - room}."
            )
        self.max_new_tokens = min(self.max_new_tokens, room - n_prompt + 1)

    def loop(self) -> Completion:
        """The two computations: prefill once, then decode token by token."""
        with torch.inference_mode():
            try:
                self._prepare()
                logits = self._feed(self.prompt_ids)
                while True:
                    with self.timer("sample"):
                        token_id = self.sampler(logits[0])
                    reason = self._emit(token_id)
                    if reason:
                        break
                    self.timer.begin_step("decode")
                    logits = self._decode(token_id)
            except Cancelled:
                reason = "cancelled"
        return self._finish(reason)

    def _prepare(self) -> None:
        """Seed the sampler, allocate the cache and bind the backend to it."""
        model, pipeline = self.model, self.pipeline
        with self.timer("schedule"):
            self.sampler = Sampler(pipeline.sampling, seed=self.seed, device=model.device)
            self.sampler.remember(self.prompt_ids)
            self.stream = model.tokenizer.stream()
            self.meta = {
                "model": model.name,
                "weights": model.weights or dtype_name(model.dtype),
                "dtype": dtype_name(model.dtype),
                "device": str(model.device),
                "sampling": vars(pipeline.sampling),
                "seed": self.seed,
                "weights_bytes": pipeline.weights_bytes,
                "kv_caches": [],
            }
        self._bind_cache()

    def use_cache(self, choice: Any) -> None:
        """Ask for another cache from the next token on. May be called from another thread."""
        self._wanted_cache = registry.find("kv_cache", choice)

    def _bind_cache(self) -> None:
        """Allocate the wanted cache and bind the backend to it. It is empty: the next step feeds it everything."""
        model, pipeline = self.model, self.pipeline
        (component, config), self._wanted_cache = self._wanted_cache, None
        with self.timer("kv_cache"):
            self.cache = None  # the former one's memory comes first
            capacity = len(self.prompt_ids) + self.max_new_tokens - 1
            self.cache = component.build(
                config,
                layers=model.transformer.cache_entries,
                capacity_tokens=max(capacity, 1),
                device=model.device,
                dtype=model.dtype,
            )
        with self.timer("schedule"):
            name, self.step = backends.bind(pipeline.backend, transformer=model.transformer, cache=self.cache)
        bound = {"kv_cache": component.name, "kv_cache_bytes": self.cache.nbytes, "backend": name}
        used = {"from_token": len(self.token_ids), "name": component.name, "nbytes": self.cache.nbytes}
        self.meta = self.meta | bound | {"kv_caches": [*self.meta["kv_caches"], used]}

    def _feed(self, token_ids: list[int]) -> torch.Tensor:
        """Tokens through the model, a chunk at a time where the cache remembers the chunk before."""
        chunk = len(token_ids)
        if self.cache.keeps_history:
            chunk = PREFILL_CHUNK_TOKENS.get(self.model.device.type, 8192)
        logits = None
        for start in range(0, len(token_ids), chunk):
            logits = self._forward(token_ids[start : start + chunk])
        assert logits is not None
        return logits

    def _decode(self, token_id: int) -> Any:
        """One token through the model; where nothing is remembered, the whole sequence again. A step on a GPU may
        choose for itself, ahead of the host: for logits, the sampler then gets the choice."""
        if self._wanted_cache is not None:
            self._bind_cache()
        remembers = self.cache.n_tokens() > 0
        if remembers and self.sampler.takes_largest and hasattr(self.step, "choose_next"):
            self.timer.steps[-1].n_tokens += 1
            more = len(self.token_ids) + 1 < self.max_new_tokens
            options = {"timer": self.timer, "should_stop": self.stop_event.is_set}
            return [self.step.choose_next(token_id, more=more, **options)]
        return self._feed([token_id] if remembers else self.prompt_ids + self.token_ids)

    def _forward(self, token_ids: list[int]) -> torch.Tensor:
        with self.timer("schedule"):  # what the step does in no phase of its own
            with self.timer("embed"):
                ids = torch.from_numpy(np.array(token_ids, np.int64))  # torch.tensor takes 50 us more
                ids = ids.to(self.model.device)
            self.timer.steps[-1].n_tokens += len(token_ids)
            return self.step(ids, timer=self.timer, should_stop=self.stop_event.is_set)

    def _emit(self, token_id: int) -> str | None:
        """Give the token's text to the reader; returns why the run ends here, or None."""
        with self.timer("detokenize"):
            ends = token_id in self.model.tokenizer.eos_ids and not self.ignore_eos
            self.token_ids.append(token_id)
            if not ends:
                self._write(self.stop_strings.push(self.stream.push(token_id)))
            self.token_s.append(self.timer.now_s())
        if ends or self.stop_strings.hit:
            return "stop"
        if len(self.token_ids) >= self.max_new_tokens:
            return "length"
        return "cancelled" if self.stop_event.is_set() else None

    def _write(self, piece: str) -> None:
        if piece:
            self.text.append(piece)
            self.pieces.put(piece)

    def _finish(self, reason: str) -> Completion:
        with self.timer("detokenize"):
            if not self.stop_strings.hit:
                self._write(self.stop_strings.push(self.stream.flush()))
                self._write(self.stop_strings.flush())
        self.timer.end_step()
        self.wall_s = self.timer.now_s()
        if isinstance(self.timer, CudaTimer):
            self.timer.finish()
        self.meta["finish_reason"] = reason
        return Completion("".join(self.text), list(self.token_ids), reason, self.trace())

    def trace(self) -> Trace:
        """The trace so far; safe from another thread."""
        served = {}
        if (step := self.step) is not None:
            served = {"computed_by": step.computed_by, "backend_note": step.reason}
        return Trace(
            tuple(self.timer.records()),
            tuple(self.token_s),
            self.wall_s or self.timer.now_s(),
            len(self.prompt_ids),
            self.meta | served,
        )


def _as_sampling(choice: Any) -> Sampling:
    """A Sampling from None (greedy), a Sampling, a sampler's name, or a sampler's config."""
    if choice is None:
        return Sampling()
    if isinstance(choice, Sampling):
        return choice
    component, config = registry.find("sampler", choice)
    return component.build(config)


def _defaults(prompt: str, options: dict[str, Any]) -> dict[str, Any]:
    known = {"max_new_tokens": 128, "chat": False, "seed": 0, "stop": (), "ignore_eos": False}
    if unknown := set(options) - set(known):
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}: generate() takes {', '.join(known)}.")
    return {"prompt": prompt, **known, **options}
