"""A scheduler on paper: how many steps it takes, with no model behind it. What comes out is counted, not measured.

>>> from labkit.serving import Continuous, Static
>>> n_steps(Static(max_requests=2), [4, 1, 1, 1]), n_steps(Continuous(max_requests=2), [4, 1, 1, 1])
(5, 4)
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from labkit import registry
from labkit.serving.queues import Queues
from labkit.serving.request import Request


class _NoEngine:
    """A cache with room for everyone, that counts tokens and keeps none."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}
        self.cache = SimpleNamespace(n_tokens=lambda sequence_id: self.seen.get(sequence_id, 0))

    def open(self, sequence: Any) -> int:
        return 0

    def release(self, sequence: Any) -> None:
        self.seen.pop(sequence.sequence_id, None)


def n_steps(scheduler: Any, n_tokens: Sequence[int]) -> int:
    """Steps until every request has generated its ``n_tokens``, all there from the start, prompts of one token."""
    component, config = registry.find("scheduler", scheduler)
    policy, engine = component.build(config), _NoEngine()
    queues = Queues(engine, policy.max_requests)
    left = {}
    for idx, n in enumerate(n_tokens):
        left[idx] = n
        queues.put(Request(SimpleNamespace(sequence_id=idx, ids=[0], n_new=0), arrived_s=float(idx)))  # type: ignore[arg-type]
    steps = 0
    while plan := policy.plan(queues):
        steps += 1
        policy.note(len(plan), 0, 1.0)  # chunks that follow the clock: on paper every step takes as long
        for request, _ in plan:
            sequence: Any = request.sequence
            engine.seen[request.request_id] = len(sequence.ids)
            sequence.ids.append(0)
            left[request.request_id] -= 1
            if not left[request.request_id]:
                queues.remove(request)
    return steps
