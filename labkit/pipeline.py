"""The textbook loop: one prompt in, one token at a time out, every step timed.

    tokenize -> prefill (all prompt tokens at once) -> sample -> [decode one token -> sample] ... -> text

Read ``loop`` first, then ``Engine.step``, which it repeats. The rest makes it stoppable, streamable and repeatable.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Any

import torch

from labkit import registry
from labkit.decoding import Sampling, StopStrings, drafters
from labkit.engine import PREFILL_CHUNK_TOKENS, Engine
from labkit.model.model import Model
from labkit.model.step import Cancelled
from labkit.perf import workers
from labkit.perf.cuda_timer import CudaTimer
from labkit.perf.timer import Timer
from labkit.perf.trace import Trace
from labkit.run import Completion, Run
from labkit.sequence import Sequence, check_max_new_tokens

__all__ = ["PREFILL_CHUNK_TOKENS", "Completion", "Pipeline", "Run"]


def loop(engine: Engine, sequence: Sequence) -> None:
    """The two computations: prefill once, then decode token by token."""
    with torch.inference_mode():
        try:
            while sequence.finish_reason is None:
                if sequence.n_new:  # the prefill's record has been open since the prompt was tokenized
                    engine.timer.begin_step("decode")
                engine.step([sequence], should_stop=sequence.stop_event.is_set)
        except Cancelled:
            sequence.finish_reason = "cancelled"
    sequence.finish()


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
        registry.find("kv_cache", kv_cache)
        self.kv_cache = kv_cache
        self.sampling = as_sampling(sampling)
        self.drafter = None if drafter is None else drafters.choose(drafter, target=model)
        """Built here: what it must load, it loads once."""
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
        stop: Listed[str] = (),
        ignore_eos: bool = False,
    ) -> Run:
        """Start generating in a worker thread; iterate the returned ``Run`` for text as it comes.

        ``chat`` wraps the prompt in the model's chat template. ``ignore_eos`` runs to ``max_new_tokens`` whatever
        the model says, for measurements. Raises ValueError at once for an empty prompt, a prompt longer than the
        context, or ``max_new_tokens`` below 1."""
        if not isinstance(prompt, str) or not prompt:
            raise ValueError("the prompt is empty: give the model at least one character to continue.")
        check_max_new_tokens(max_new_tokens)
        StopStrings(stop)
        timer: Any = CudaTimer(device=self.model.device) if self.model.device.type == "cuda" else Timer()
        timer.begin()
        timer.begin_step("prefill")
        with timer("tokenize"):
            messages = [{"role": "user", "content": prompt}]
            text = self.model.tokenizer.apply_chat_template(messages) if chat else prompt
            prompt_ids = self.model.tokenizer.encode_prompt(text, chat=chat)
        with timer("schedule"):
            sequence = Sequence(
                self.model,
                prompt_ids,
                timer=timer,
                sampling=self.sampling,
                seed=seed,
                max_new_tokens=max_new_tokens,
                stop=stop,
                ignore_eos=ignore_eos,
                continues=not chat,
            )
            sequence.meta["weights_bytes"] = self.weights_bytes
            engine = Engine(
                self.model,
                timer=timer,
                capacity_tokens=sequence.n_prompt + sequence.max_new_tokens - 1,
                kv_cache=self.kv_cache,
                backend=self.backend,
                drafter=self.drafter,
            )
        work = _Work(engine, sequence)
        workers.begin(work.do, name="labkit-run", stop=sequence.stop_event.set)
        return Run(sequence, trace=work.trace, engine=engine)

    def generate(self, prompt: str, **options: Any) -> Completion:
        """The same in the foreground. Takes ``run``'s options. Ctrl-C raises KeyboardInterrupt and loses nothing:
        the next run starts clean."""
        # In a thread of its own all the same: an interrupt would otherwise wait until a compiled step has ended.
        known = ("max_new_tokens", "chat", "seed", "stop", "ignore_eos")
        if unknown := set(options) - set(known):
            raise TypeError(f"unknown option {', '.join(sorted(unknown))}: generate() takes {', '.join(known)}.")
        return self.run(prompt, **options).result()


class _Work:
    """What the thread of one run does."""

    def __init__(self, engine: Engine, sequence: Sequence) -> None:
        self.engine, self.sequence = engine, sequence

    def do(self) -> None:
        sequence, timer = self.sequence, self.engine.timer
        try:
            loop(self.engine, sequence)
            timer.end_step()
            sequence.wall_s = timer.now_s()
            if isinstance(timer, CudaTimer):
                timer.finish()
            sequence.close(self.trace())
        except BaseException as error:  # noqa: BLE001 - re-raised to whoever reads the run
            sequence.close(error=error)

    def trace(self) -> Trace:
        """The trace so far; safe from another thread."""
        sequence, timer = self.sequence, self.engine.timer
        ended: dict[str, Any] = {} if sequence.finish_reason is None else {"finish_reason": sequence.finish_reason}
        if sequence.speculation is not None:
            ended["speculation"] = sequence.speculation.record
        return Trace(
            tuple(timer.records()),
            tuple(sequence.token_s),
            sequence.wall_s or timer.now_s(),
            sequence.n_prompt,
            sequence.meta | self.engine.served | ended,
        )


def as_sampling(choice: Any) -> Sampling:
    """A Sampling from None (greedy), a Sampling, a sampler's name, or a sampler's config."""
    if choice is None:
        return Sampling()
    if isinstance(choice, Sampling):
        return choice
    component, config = registry.find("sampler", choice)
    return component.build(config)
