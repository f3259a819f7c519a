"""Which requests take part in the next step, and with how many tokens: the whole difference between the policies.

    static           a batch is filled when the one before has ended; nobody joins it
    continuous       at each step, whoever ended has left and whoever waits joins (Orca, OSDI 2022)
    chunked-prefill  the same, but a step has a token budget: decodes come first, prompts get what is left
                     (Sarathi-Serve, arXiv 2403.02310)

Read ``_fill`` first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from labkit.registry import check_options, option, register
from labkit.serving.pace import Pace
from labkit.serving.queues import Queues
from labkit.serving.request import Request

Plan = list[tuple[Request, int]]
"""Requests of the next step, and how many of its unseen tokens each feeds."""

ORDERS = ("arrival", "fair")


class Scheduler(Protocol):
    """``plan`` admits and preempts as it sees fit, and says what the next step is; empty when nobody can run."""

    max_requests: int

    def plan(self, queues: Queues) -> Plan: ...

    def note(self, n_decodes: int, n_prompt_tokens: int, seconds: float) -> None:
        """What a step took, for schedulers that go by it."""


@dataclass(frozen=True)
class Static:
    """Whoever waits, up to ``max_requests``, is one batch; the next is taken when the last of it has ended."""

    max_requests: int = option(8, low=1, high=256, step=1, help="requests in one batch")


@dataclass(frozen=True)
class Continuous:
    """Requests join and leave at every step. ``order``: first come first served, or the user served least."""

    max_requests: int = option(8, low=1, high=256, step=1, help="requests in one step")
    order: str = option("arrival", choices=ORDERS, help="who is next among equal priorities")


@dataclass(frozen=True)
class ChunkedPrefill:
    """As continuous, with at most ``token_budget`` tokens a step: a long prompt comes in chunks beside the decodes.

    ``max_slowdown``: the chunks are chosen so that a step takes at most so many times as long as its decodes alone."""

    max_requests: int = option(8, low=1, high=256, step=1, help="requests in one step")
    token_budget: int = option(128, low=16, high=8192, step=16, help="tokens in one step, prompts and decodes together")
    order: str = option("arrival", choices=ORDERS, help="who is next among equal priorities")
    max_slowdown: float = option(
        0.0, low=0.0, high=100.0, step=0.5, help="how much longer a step with prompts may take; 0: by the budget alone"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if 0.0 < self.max_slowdown <= 1.0:
            raise ValueError(
                f"max_slowdown is {self.max_slowdown:g}: a step with prompts takes longer, so over 1, or 0."
            )


class StaticScheduler:
    """What finished stays out of the step but its place stays empty: no row is computed in vain here, which flatters
    static batching a little."""

    def __init__(self, config: Static) -> None:
        self.max_requests = config.max_requests

    def plan(self, queues: Queues) -> Plan:
        joining = not queues.running
        return _fill(queues, budget=None, joining=joining, key=lambda request: request.rank)

    def note(self, n_decodes: int, n_prompt_tokens: int, seconds: float) -> None:
        pass


class ContinuousScheduler:
    def __init__(self, config: Continuous | ChunkedPrefill) -> None:
        self.max_requests, self.order = config.max_requests, config.order
        self.budget, self.pace = None, None
        if isinstance(config, ChunkedPrefill):
            self.budget = config.token_budget
            self.pace = Pace(config.max_slowdown) if config.max_slowdown else None

    def plan(self, queues: Queues) -> Plan:
        key = queues.fair_key if self.order == "fair" else (lambda request: request.rank)
        budget = self.budget
        if budget is not None and self.pace is not None:
            n_decodes = sum(queues.n_unseen(request) == 1 for request in queues.running)
            budget = n_decodes + self.pace.tokens(n_decodes, max(1, budget - n_decodes))
        return _fill(queues, budget=budget, joining=True, key=key)

    def note(self, n_decodes: int, n_prompt_tokens: int, seconds: float) -> None:
        if self.pace is not None:
            self.pace.note(n_decodes, n_prompt_tokens, seconds)


def _fill(queues: Queues, *, budget: int | None, joining: bool, key: Any) -> Plan:
    """The next step: decodes, then prompts under way, then newcomers, while tokens and blocks last."""
    left = budget if budget is not None else 1 << 40
    plan: Plan = []
    n_blocks = 0
    decoding_first = sorted(queues.running, key=lambda request: (queues.n_unseen(request) > 1, request.rank))
    for request in decoding_first:
        if request.state != "running":
            continue  # it has made room for one before it
        n_tokens = min(queues.n_unseen(request), left)
        if not n_tokens:
            continue
        needed = queues.n_blocks_for(request, n_tokens)
        while not queues.fits(n_blocks + needed) and request.state == "running":
            last = max(queues.running, key=lambda r: r.rank)
            n_blocks -= _withdraw(queues, plan, last)
            queues.preempt(last)
        if request.state == "running":
            plan.append((request, n_tokens))
            n_blocks, left = n_blocks + needed, left - n_tokens
    for request in queues.order(key) if joining else ():
        if left < 1 or request.state != "waiting":
            break
        n_blocks -= _make_place(queues, plan, request)
        if not queues.n_free_places:
            break
        queues.admit(request)
        n_unseen = queues.n_unseen(request)
        n_tokens, needed = min(n_unseen, left), queues.n_blocks_for(request, n_unseen)
        # The whole prompt must fit, not its first chunk alone: half a prompt that waits for blocks holds others up.
        while not queues.fits(n_blocks + needed) and (last := _lower(queues, request)) is not None:
            n_blocks -= _withdraw(queues, plan, last)
            queues.preempt(last)
        if not queues.fits(n_blocks + needed):
            _send_back(queues, request)
            break
        plan.append((request, n_tokens))
        n_blocks, left = n_blocks + needed, left - n_tokens
    return plan


def _withdraw(queues: Queues, plan: Plan, request: Request) -> int:
    """Take a request out of the plan; how many blocks it was to take."""
    for idx, (planned, n_tokens) in enumerate(plan):
        if planned is request:
            del plan[idx]
            return queues.n_blocks_for(request, n_tokens)
    return 0


def _make_place(queues: Queues, plan: Plan, request: Request) -> int:
    """Where no place is free, a running request of lower priority makes one; how many planned blocks come back."""
    last = None if queues.n_free_places else _lower(queues, request)
    if last is None:
        return 0
    n_blocks = _withdraw(queues, plan, last)
    queues.preempt(last)
    return n_blocks


def _lower(queues: Queues, request: Request) -> Request | None:
    """The running request to make room first, if its priority is lower than that of ``request``."""
    lower = [running for running in queues.running if running.priority > request.priority]
    return max(lower, key=lambda running: running.rank, default=None)


def _send_back(queues: Queues, request: Request) -> None:
    queues.engine.release(request.sequence)
    queues.running.remove(request)
    request.state = "waiting"
    queues.waiting.append(request)


@register("scheduler", "static", config=Static, summary="A batch at a time: it is full, it runs, it ends, the next")
def build_static(config: Static) -> Scheduler:
    return StaticScheduler(config)


@register("scheduler", "continuous", config=Continuous, summary="Requests join and leave the batch at every step")
def build_continuous(config: Continuous) -> Scheduler:
    return ContinuousScheduler(config)


@register(
    "scheduler",
    "chunked-prefill",
    config=ChunkedPrefill,
    summary="Continuous, with a token budget a step: a long prompt does not hold the others up",
)
def build_chunked(config: ChunkedPrefill) -> Scheduler:
    return ContinuousScheduler(config)
