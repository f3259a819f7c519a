"""One request in the serving engine: what was asked, the state it is in, and when what happened to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from labkit.perf.timer import StepRecord
from labkit.perf.trace import Trace
from labkit.sequence import Sequence

State = Literal["waiting", "running", "finished"]


@dataclass(frozen=True)
class Slice:
    """A stretch of a request's life: ``kind`` is "queue", "prefill", "decode" or "recompute" (of what a preempted
    request had lost). Seconds on the engine's clock."""

    kind: str
    start_s: float
    end_s: float
    n_tokens: int = 0


@dataclass(eq=False)
class Request:
    """A ``Sequence`` with a place in the queue.

    ``priority``: lower is served first, whoever came first among equals. ``user``: whose turn it is, for a fair order.
    """

    sequence: Sequence
    arrived_s: float
    priority: int = 0
    user: str = ""
    state: State = "waiting"
    n_shared: int = 0
    """Prompt tokens whose keys and values another request had computed."""
    n_preempted: int = 0
    started_s: float | None = None
    """When it first left the queue."""
    ended_s: float | None = None
    slices: list[Slice] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    tokenize_s: float = 0.0
    _told_s: float = 0.0

    def __post_init__(self) -> None:
        self._told_s = self.arrived_s

    @property
    def request_id(self) -> int:
        return self.sequence.sequence_id

    @property
    def rank(self) -> tuple[int, float, int]:
        """The smaller, the sooner it is served and the later it must make room."""
        return self.priority, self.arrived_s, self.request_id

    def took_part(self, stage: str, start_s: float, end_s: float, n_tokens: int, phases: dict[str, float]) -> None:
        """Note a step of the engine. A request waits for the whole step, so all its phases are the request's own; the
        time since the step before, in which it waited for others, is charged to ``schedule``."""
        waited_s = max(0.0, start_s - self._told_s)
        since = self._told_s - self.arrived_s
        record = StepRecord(stage, since, end_s - self.arrived_s, n_tokens, dict(phases))
        if not self.steps and self.tokenize_s:
            record.phases["tokenize"] = self.tokenize_s
            waited_s = max(0.0, waited_s - self.tokenize_s)
        record.phases["schedule"] = record.phases.get("schedule", 0.0) + waited_s
        if self.steps and self.steps[-1].stage == "prefill" == stage:  # the chunks of one prompt are one prefill
            before = self.steps.pop()
            record.start_s, record.n_tokens = before.start_s, before.n_tokens + n_tokens
            for name, seconds in before.phases.items():
                record.phases[name] = record.phases.get(name, 0.0) + seconds
        self.steps.append(record)
        if self.started_s is None:
            self.started_s = start_s
        if waited_s > 1e-3 or not self.slices:
            self._add(Slice("queue", self._told_s, start_s))
        kind = "recompute" if stage == "decode" and n_tokens > 1 and self.n_preempted else stage
        self._add(Slice(kind, start_s, end_s, n_tokens))
        self._told_s = end_s

    def _add(self, piece: Slice) -> None:
        last = self.slices[-1] if self.slices else None
        if last is not None and last.kind == piece.kind and piece.start_s - last.end_s < 2e-3:
            self.slices[-1] = Slice(last.kind, last.start_s, piece.end_s, last.n_tokens + piece.n_tokens)
        else:
            self.slices.append(piece)

    def trace(self, now_s: float, served: dict[str, Any]) -> Trace:
        """The request as a run of its own, from its arrival; ``now_s`` on the engine's clock."""
        sequence = self.sequence
        ended = {} if sequence.finish_reason is None else {"finish_reason": sequence.finish_reason}
        queue_s = (now_s if self.started_s is None else self.started_s) - self.arrived_s
        about = {"request_id": self.request_id, "queue_s": queue_s, "n_shared_tokens": self.n_shared}
        return Trace(
            tuple(self.steps),
            tuple(sequence.token_s),
            (now_s if self.ended_s is None else self.ended_s) - self.arrived_s,
            sequence.n_prompt,
            sequence.meta | served | about | {"n_preempted": self.n_preempted} | ended,
        )
