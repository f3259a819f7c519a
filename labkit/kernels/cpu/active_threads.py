"""How many of a team's threads take a step: all of them, or fewer while somebody else needs the cores.

A step meets at some 150 barriers, so one thread that has lost its core to a browser or a notebook's server holds up
all the others for a time slice. On two cores that can cost more than the second thread brings. Whether it does is
measured: when other processes are busy, a few steps are run with one thread less, and the faster number stays until
they are done. The tokens are the same with any number (``step.N_PARTS``). Steps of few tokens and of many choose each
for themselves; a prompt is over before it has a choice, but without a KV cache every step is a prompt.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from statistics import median
from typing import Protocol

import numpy as np

from labkit.perf.busy import BusyWatch

LOOK_EVERY_S = 0.3
"""How often the processor times are read."""
BUSY, QUIET = 0.10, 0.05
"""Share of the cores that others take, above which fewer threads are tried, and below which all return."""
TRIAL_STEPS = 3
TRY_AGAIN_S = 1.5
GAIN = 0.95
"""A number of threads must be faster by this much to replace another."""


class Squad(Protocol):
    """What is needed of a team."""

    n_threads: int

    def run(self, job: np.ndarray, n_threads: int = 0) -> float: ...


class ActiveThreads:
    """One model's threads over time, in steps of one kind, whatever runs it has: ``run`` counts and chooses."""

    _lock = threading.Lock()

    def __init__(self) -> None:
        self.n_active = 0
        """Threads that take the next step; 0: all."""
        self._trial = 0
        self._steps: dict[int, deque[float]] = {}
        """By number of threads: seconds a token of the last steps."""
        self._watch: BusyWatch | None = None
        self._looked_s = self._tried_s = -1e9

    def run(self, team: Squad, job: np.ndarray, *, n_tokens: int = 1) -> None:
        """Run the job, a step of ``n_tokens``, perhaps with fewer threads."""
        if team.n_threads == 1:
            team.run(job)
            return
        n = min(self._trial or self.n_active or team.n_threads, team.n_threads)
        seconds = team.run(job, n)
        with self._lock:
            self._steps.setdefault(n, deque(maxlen=5)).append(seconds / n_tokens)
            if self._trial:
                if n == self._trial and len(self._steps[n]) >= TRIAL_STEPS:
                    self._end_trial(team.n_threads)
            elif (now := time.perf_counter()) - self._looked_s > LOOK_EVERY_S:
                self._look(team.n_threads, now, seconds)

    def _look(self, n_all: int, now: float, seconds: float) -> None:
        """Read what others took since the last look, and begin a trial where it might help. ``seconds``: of the step
        that has just ended, which may be longer than the time between two looks."""
        recent = self._watch is not None and now - self._looked_s < 4 * LOOK_EVERY_S + seconds
        share = self._watch.so_far()[0] if self._watch is not None and recent else 0.0
        self._looked_s = now
        self._watch = BusyWatch().__enter__()
        if not recent:
            self.n_active = 0  # what was found then says nothing of now
        n = self.n_active or n_all
        if not recent or n > n_all or len(self._steps.get(n, ())) < TRIAL_STEPS:
            return
        if n < n_all and share < QUIET:
            self.n_active = 0
            return
        if now - self._tried_s < TRY_AGAIN_S:
            return
        if share > BUSY or n < n_all:
            self._tried_s = now
            self._trial = n - 1 if n == n_all else n_all
            self._steps[self._trial] = deque(maxlen=5)

    def _end_trial(self, n_all: int) -> None:
        tried, n = self._trial, self.n_active or n_all
        self._trial = 0
        if self._steps.get(n) and median(self._steps[tried]) < GAIN * median(self._steps[n]):
            self.n_active = 0 if tried == n_all else tried

    def note(self, n_all: int) -> str:
        """For a run's notes: "" while all threads take part."""
        if not self.n_active:
            return ""
        return f"{self.n_active} of {n_all} threads took the last steps, because other programs were using the cores"


def _after_fork() -> None:
    """Another thread of the first process may have held the lock; none of this one does."""
    ActiveThreads._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
