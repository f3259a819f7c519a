"""One model, one engine, many requests: a thread that asks the scheduler what goes into the next step, and takes it.

    submit -> waiting --admit--> running --ends--> finished
                 ^--- preempt ------'

Read ``Service.step`` first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any

import torch

from labkit import registry
from labkit.decoding import drafters
from labkit.engine import Engine
from labkit.model.model import Model
from labkit.model.step import Cancelled
from labkit.perf import workers
from labkit.perf.timer import Timer
from labkit.pipeline import as_sampling
from labkit.run import Completion, Run
from labkit.sequence import Sequence
from labkit.serving.asking import TooBusy, encode, fit
from labkit.serving.queues import Queues
from labkit.serving.request import Request
from labkit.serving.schedulers import Scheduler

N_KEPT_REQUESTS, N_KEPT_MOMENTS = 1000, 20_000
"""The latest ones, to look at; a request keeps its trace, some 20 KB, and a server runs for days."""
LONGEST_TOKENS = 2048
"""What a sequence may grow to where nothing else is asked for and the model's context is longer."""


@dataclass(frozen=True)
class Moment:
    """What one step of the engine was: when, for how many, and how full the blocks are after it."""

    start_s: float
    end_s: float
    n_requests: int
    n_tokens: int
    n_waiting: int
    n_used_blocks: int
    held_tokens: int
    """Tokens that the running requests have in the cache."""
    reserved_tokens: int
    """Tokens that there would be room for in what is set aside for them."""


class Service:
    """Serves requests together on one model.

    >>> service = Service(model, scheduler="continuous")                           # doctest: +SKIP
    >>> runs = [service.run(prompt, max_new_tokens=40) for prompt in prompts]      # doctest: +SKIP
    >>> texts = [run.result().text for run in runs]                                # doctest: +SKIP

    ``capacity_tokens``: what prompt and answer of one request may come to together. ``max_waiting``: how many may
    wait before ``TooBusy`` is raised. ``drafter``: each request's next tokens are guessed, and checked in one step.
    ``start=False`` leaves the steps to the caller (``step``), for tests.
    """

    def __init__(
        self,
        model: Model,
        *,
        scheduler: Any = "continuous",
        kv_cache: Any = "paged",
        drafter: Any = None,
        backend: Any = "auto",
        capacity_tokens: int | None = None,
        max_waiting: int = 1000,
        start: bool = True,
    ) -> None:
        component, config = registry.find("scheduler", scheduler)
        self.model, self.max_waiting = model, max_waiting
        self.scheduler_name = component.name
        self.scheduler: Scheduler = component.build(config)
        self.timer = Timer(detail_every=0)  # on a GPU too: a step ends when its tokens are on the host
        self.engine = Engine(
            model,
            timer=self.timer,
            capacity_tokens=min(capacity_tokens or LONGEST_TOKENS, model.config.context_tokens),
            n_sequences=self.scheduler.max_requests,
            kv_cache=kv_cache,
            backend=model.backend if backend == "auto" else backend,
            drafter=None if drafter is None else drafters.choose(drafter, target=model),
        )
        self.engine.prepare()
        self.queues = Queues(self.engine, self.scheduler.max_requests)
        self.requests: deque[Request] = deque(maxlen=N_KEPT_REQUESTS)
        """Those that have ended, oldest first."""
        self.moments: deque[Moment] = deque(maxlen=N_KEPT_MOMENTS)
        self.on_end: list[Any] = []
        """Functions that are told of each request that has ended."""
        self._next_id = 1  # 0 is the sequence of a run that has its cache to itself
        self._incoming: deque[Request] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        if start:
            self.start()

    # --- for those who ask ----------------------------------------------------------------------------

    def submit(
        self,
        prompt: str | Listed[int] | Listed[Mapping[str, Any]],
        *,
        max_new_tokens: int = 128,
        chat: bool = False,
        sampling: Any = None,
        seed: int = 0,
        stop: Listed[str] = (),
        ignore_eos: bool = False,
        n_logprobs: int | None = None,
        priority: int = 0,
        user: str = "",
        on_change: Any = None,
    ) -> Request:
        """Put a request in the queue. ``prompt``: a text, token ids, or a list of messages; ``chat`` makes a text one
        message. Lower ``priority`` is served first. Raises TooBusy, or ValueError when it could never be served."""
        if self._closing:
            raise RuntimeError("this service is closed: make another one.")
        if (n_waiting := self.n_waiting) >= self.max_waiting:
            raise TooBusy(n_waiting, self._seconds_to_a_place())
        arrived_s = self.timer.now_s()
        prompt_ids, continues = encode(self.model, prompt, chat)
        tokenize_s = self.timer.now_s() - arrived_s
        with self._changed:
            sequence_id, self._next_id = self._next_id, self._next_id + 1
        sequence = Sequence(
            self.model,
            prompt_ids,
            timer=self.timer,
            sequence_id=sequence_id,
            sampling=as_sampling(sampling),
            seed=seed,
            max_new_tokens=max_new_tokens,
            stop=stop,
            ignore_eos=ignore_eos,
            continues=continues,
            n_logprobs=n_logprobs,
            began_s=arrived_s,
        )
        fit(sequence, self.n_room)
        sequence.on_change = on_change
        sequence.meta["scheduler"] = self.scheduler_name
        request = Request(sequence, arrived_s, priority=priority, user=user, tokenize_s=tokenize_s)
        with self._changed:
            self._incoming.append(request)
            self._changed.notify()
        return request

    @property
    def n_waiting(self) -> int:
        return len(self.queues.waiting) + len(self._incoming)

    @property
    def alive(self) -> bool:
        """Whether requests are being served."""
        return self._thread is not None and self._thread.is_alive() and not self._closing

    @property
    def n_room(self) -> int:
        """Tokens that prompt and answer of one request may come to in an empty cache."""
        cache = self.engine.cache
        if self.queues.n_free_blocks is None:
            return cache.capacity_tokens
        return min(cache.capacity_tokens, cache.n_blocks * cache.block_size)

    def run(self, prompt: Any, **options: Any) -> Run:
        """``submit``, with the handle that a pipeline's run has. Iterate it for text; ``stop()`` ends it."""
        return self.handle(self.submit(prompt, **options))

    def handle(self, request: Request) -> Run:
        """What a request's reader holds."""
        return Run(request.sequence, trace=lambda: request.trace(self.timer.now_s(), self.engine.served))

    def generate(self, prompt: Any, **options: Any) -> Completion:
        """Submit and wait for the end."""
        return self.run(prompt, **options).result()

    def close(self, timeout: float | None = 30.0) -> None:
        """End what runs and what waits (their readers see "cancelled"), and the thread."""
        self._stop()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout)
        else:
            self._end_all()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin to serve: for requests that are all to be there at the first step."""
        self._thread = workers.begin(self._serve, name="labkit-serving", stop=self._stop)

    # --- the work -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> bool:
        """One step for whoever the scheduler chooses; False when there was nothing to do."""
        self._receive()
        for request in [r for r in (*self.queues.waiting, *self.queues.running) if r.sequence.stop_event.is_set()]:
            self._end(request, "cancelled")
        with self.timer("schedule"):
            plan = self.scheduler.plan(self.queues)
        if not plan:
            return False
        self.timer.begin_step("decode")
        del self.timer.steps[:-1]  # each request keeps its own
        start_s = self.timer.steps[-1].start_s
        stages = ["decode" if request.sequence.n_new else "prefill" for request, _ in plan]
        limits = {request.request_id: n_tokens for request, n_tokens in plan}
        n_before = [request.sequence.n_new for request, _ in plan]
        try:
            with self.timer("schedule"):  # what the step does in no phase of its own
                self.engine.step([request.sequence for request, _ in plan], limits=limits, should_stop=self._is_closing)
        except Cancelled:
            return True
        except Exception as error:  # noqa: BLE001 - it reaches each reader, and the next requests are served
            for request, _ in plan:
                self._end(request, error=error)
            return True
        self.timer.end_step()
        record = self.timer.steps[-1]
        for (request, n_tokens), stage, n in zip(plan, stages, n_before, strict=True):
            request.took_part(stage, start_s, record.end_s, n_tokens, record.phases)
            self.queues.count_served(request, n_tokens + request.sequence.n_new - n)
        n_decodes = stages.count("decode")
        self.scheduler.note(n_decodes, sum(limits.values()) - n_decodes, record.end_s - start_s)
        self._note(start_s, record.end_s, limits)
        for request, _ in plan:
            if request.sequence.finish_reason is not None:
                self._end(request, request.sequence.finish_reason)
        return True

    def _serve(self) -> None:
        while not self._closing:
            if not self.step():
                with self._changed:
                    self._changed.wait_for(lambda: self._incoming or self._closing, timeout=0.05)
        self._end_all()

    def _stop(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()

    def _receive(self) -> None:
        while self._incoming:
            self.queues.put(self._incoming.popleft())

    def _end(self, request: Request, reason: str | None = None, error: BaseException | None = None) -> None:
        """Free what a request holds, and tell its reader."""
        sequence = request.sequence
        self.queues.remove(request)
        sequence.finish_reason = reason
        sequence.finish()
        request.ended_s = self.timer.now_s()
        sequence.wall_s = request.ended_s - request.arrived_s
        self.requests.append(request)
        for tell in self.on_end:
            tell(request)
        trace = None if error is not None else request.trace(request.ended_s, self.engine.served)
        sequence.close(trace, error)

    def _end_all(self) -> None:
        self._receive()
        for request in (*self.queues.waiting, *self.queues.running):
            self._end(request, "cancelled")

    def _note(self, start_s: float, end_s: float, limits: dict[int, int]) -> None:
        cache, running = self.engine.cache, self.queues.running
        held = sum(cache.n_tokens(request.request_id) for request in running)
        used = 0
        reserved = len(running) * cache.capacity_tokens
        if self.queues.n_free_blocks is not None:
            used = cache.allocator.n_used
            reserved = sum(len(cache.block_ids(request.request_id)) for request in running) * cache.block_size
        n_waiting = len(self.queues.waiting)
        self.moments.append(Moment(start_s, end_s, len(limits), sum(limits.values()), n_waiting, used, held, reserved))

    def _seconds_to_a_place(self) -> float:
        """About how long until the next request ends: the median of the last ones, over how many run together."""
        recent = sorted((r.ended_s or 0.0) - r.arrived_s for r in list(self.requests)[-20:])
        return max(1.0, recent[len(recent) // 2] / max(1, self.scheduler.max_requests)) if recent else 1.0

    def _is_closing(self) -> bool:
        return self._closing
