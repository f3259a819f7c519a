"""The one timer: exclusive phases that add up to the wall clock.

``with timer("attention"):`` charges the time until the block ends to that phase, minus what blocks inside
it charge to theirs. A phase switch reads the clock once and adds one number, so a step of 30 layers
costs about 0.1 ms; ``NULL_TIMER`` does nothing at all.

On CUDA the host only queues work, so the clock there is a chain of events: ``labkit.perf.cuda_timer``.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

PHASES = (
    "tokenize",
    "embed",
    "attention",
    "ffn",
    "norm",
    "lm_head",
    "sample",
    "kv_cache",
    "draft",
    "verify",
    "detokenize",
    "schedule",
)
STAGES = ("prefill", "decode")


@dataclass(slots=True)
class StepRecord:
    """One step: the prefill (index 0) or the making of one later token. Times in seconds since the run began."""

    stage: str
    start_s: float
    end_s: float = 0.0
    n_tokens: int = 0
    """Tokens that went through the model in this step."""
    phases: dict[str, float] = field(default_factory=dict)
    detail: list[tuple[str, int, float, float]] = field(default_factory=list)
    """(phase, layer or -1, start, end) in the order they ran; filled on sampled steps only."""


class Timer:
    """Charges wall-clock time to phases, step by step.

    ``detail_every``: on the prefill and on every n-th decode step each switch is also kept as a span with its
    layer, for the timeline; 0 keeps none.
    """

    enabled = True

    host_clock = True
    """Whether phases end when the host says so; on a GPU they end when the device does (``CudaTimer``)."""

    def __init__(self, *, detail_every: int = 16) -> None:
        self.detail_every = detail_every
        self.steps: list[StepRecord] = []
        self.layer = -1
        self._stack: list[str | None] = [None]
        self._open: dict[str, _Phase] = {}
        self._folded = False
        self._totals: dict[str | None, int] = defaultdict(int)
        self._spans: list[tuple[str, int, float, float]] | None = None
        self._origin = self._last = time.perf_counter_ns()

    def __call__(self, phase: str) -> Any:
        if self._folded:
            return _NOTHING
        found = self._open.get(phase)
        if found is None:
            if phase not in PHASES:
                raise ValueError(f"unknown phase {phase!r}: choose one of {', '.join(PHASES)}.")
            found = self._open[phase] = _Phase(self, phase)
        return found

    @contextmanager
    def only(self, phase: str) -> Iterator[None]:
        """Charge everything inside to ``phase``, whatever phases the code there names: a draft model's attention is
        not the target's. Inside another ``only``, that one keeps the time."""
        if self._folded:
            yield
            return
        with self(phase):
            self._folded = True
            try:
                yield
            finally:
                self._folded = False

    def now_s(self) -> float:
        """Seconds since the run began."""
        return (time.perf_counter_ns() - self._origin) * 1e-9

    def begin(self) -> None:
        """Set the run's zero."""
        self._origin = self._last = time.perf_counter_ns()

    def begin_step(self, stage: str, n_tokens: int = 0) -> None:
        """Close the step before, if one is open, and open the next; what is charged from here on belongs to it."""
        if self.steps:
            self.end_step()
        self._switch()
        n = len(self.steps)
        detailed = self.detail_every and (n == 0 or n % self.detail_every == 0)
        self._spans = [] if detailed else None
        self._totals = defaultdict(int)
        self.steps.append(StepRecord(stage, self._seconds(self._last), n_tokens=n_tokens))

    def end_step(self) -> None:
        if not self.steps or self.steps[-1].end_s:
            return
        self._switch()
        record = self.steps[-1]
        record.phases = {name: ns * 1e-9 for name, ns in self._totals.items() if name is not None}
        record.detail = self._spans or []
        record.end_s = self._seconds(self._last)

    def charge(self, seconds: dict[str, float]) -> None:
        """Re-attribute time that the current phase has just spent: for code that a fused kernel timed inside itself.

        The sum goes from the open phase to the named ones, so the total stays the wall clock's. Within ``only`` it
        stays where it is.
        """
        if self._folded:
            return
        self._switch()
        totals, moved = self._totals, 0
        for name, value in seconds.items():
            ns = int(value * 1e9)
            totals[name] += ns
            moved += ns
        totals[self._stack[-1]] -= moved

    def records(self) -> list[StepRecord]:
        """The steps so far, the open one with what it has been charged until its last switch. Safe from any thread."""
        steps = list(self.steps)
        if steps and not steps[-1].end_s:
            totals = dict(self._totals)
            live = steps[-1]
            phases = {name: ns * 1e-9 for name, ns in totals.items() if name is not None}
            steps[-1] = StepRecord(live.stage, live.start_s, self.now_s(), live.n_tokens, phases)
        return steps

    def _seconds(self, at_ns: int) -> float:
        return (at_ns - self._origin) * 1e-9

    def _switch(self) -> None:
        now = time.perf_counter_ns()
        name = self._stack[-1]
        self._totals[name] += now - self._last
        if self._spans is not None and name is not None:
            self._spans.append((name, self.layer, self._seconds(self._last), self._seconds(now)))
        self._last = now


class _Phase:
    """Re-usable context manager for one phase name."""

    __slots__ = ("name", "timer")

    def __init__(self, timer: Timer, name: str) -> None:
        self.timer, self.name = timer, name

    def __enter__(self) -> None:
        timer = self.timer
        if timer.host_clock and timer._spans is None:  # ``_switch``, written out: this runs some twenty times a token
            now, name = time.perf_counter_ns(), timer._stack[-1]
            timer._totals[name] += now - timer._last
            timer._last = now
        else:
            timer._switch()
        timer._stack.append(self.name)

    def __exit__(self, *exc: object) -> None:
        timer = self.timer
        if timer.host_clock and timer._spans is None:
            now, name = time.perf_counter_ns(), timer._stack.pop()
            timer._totals[name] += now - timer._last
            timer._last = now
        else:
            timer._switch()
            timer._stack.pop()


_NOTHING = nullcontext()


class NullTimer:
    """Same face, no work: for benchmarks and for code that is not being watched."""

    enabled = False
    layer = -1

    def __call__(self, phase: str) -> Any:
        return _NOTHING

    def only(self, phase: str) -> Any:
        return _NOTHING

    def charge(self, seconds: dict[str, float]) -> None:
        pass


NULL_TIMER = NullTimer()
