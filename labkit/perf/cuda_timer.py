"""The timer on a GPU, where the host only queues work: its clock is a chain of events on the stream.

One event is recorded at each switch of phase and read when it has passed, so timing never makes the host wait
inside the loop. The time between two events holds whatever the device did or waited for, so the phases add up
to the wall clock here too; host-only phases (tokenize, detokenize) count by the gap they leave on the stream.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from labkit.perf.timer import StepRecord, Timer


class CudaTimer(Timer):
    """Charges the device's time. ``finish()`` waits for the device once, at the end of the run."""

    host_clock = False

    def __init__(self, *, detail_every: int = 16, device: Any = None) -> None:
        super().__init__(detail_every=detail_every)
        import torch

        self._new_event = lambda: torch.cuda.Event(enable_timing=True)
        self._stream = torch.cuda.current_stream(device)
        self._pool: list[Any] = []
        self._pending: deque[tuple[int, str | None, int, Any, Any]] = deque()
        self._ends: dict[int, float] = {}
        self._mark = self._record()

    def begin(self) -> None:
        super().begin()
        self._mark = self._record()

    def begin_step(self, stage: str, n_tokens: int = 0) -> None:
        super().begin_step(stage, n_tokens)
        self._read_passed()

    def end_step(self) -> None:
        if not self.steps or self.steps[-1].end_s:
            return
        self._switch()
        self.steps[-1].end_s = self._seconds(self._last)

    def charge(self, seconds: dict[str, float]) -> None:
        if self._folded:
            return
        self._switch()
        phases = self.steps[-1].phases
        for name, value in seconds.items():
            phases[name] = phases.get(name, 0.0) + value
            if (paying := self._stack[-1]) is not None:
                phases[paying] = phases.get(paying, 0.0) - value

    def records(self) -> list[StepRecord]:
        """The steps so far, each with the phases that the device has passed."""
        steps = list(self.steps)
        if steps and not steps[-1].end_s:
            live = steps[-1]
            steps[-1] = StepRecord(live.stage, live.start_s, self.now_s(), live.n_tokens, dict(live.phases))
        return steps

    def finish(self) -> None:
        """Wait for the device, once, and read what is left."""
        self._mark.synchronize()
        self._read_passed()

    def _record(self) -> Any:
        event = self._pool.pop() if self._pool else self._new_event()
        event.record(self._stream)
        return event

    def _switch(self) -> None:
        self._last = time.perf_counter_ns()
        after = self._record()
        self._pending.append((len(self.steps) - 1, self._stack[-1], self.layer, self._mark, after))
        self._mark = after

    def _read_passed(self) -> None:
        """Charge every interval whose end the device has passed; its first event is free again."""
        while self._pending and self._pending[0][4].query():
            step_idx, name, layer, start, end = self._pending.popleft()
            took_s = start.elapsed_time(end) * 1e-3
            self._pool.append(start)
            if step_idx < 0:
                continue
            record = self.steps[step_idx]
            at = self._ends.get(step_idx, record.start_s)
            self._ends[step_idx] = at + took_s
            if name is None:
                continue
            record.phases[name] = record.phases.get(name, 0.0) + took_s
            if self.detail_every and step_idx % self.detail_every == 0:
                record.detail.append((name, layer, at, at + took_s))
