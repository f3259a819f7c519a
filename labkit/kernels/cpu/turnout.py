"""How many of a team's threads take a decode step: all of them, or fewer while somebody else needs the cores.

A step meets at some 150 barriers, so one thread that has lost its core to a browser or a notebook's server holds up
all the others for a time slice. On two cores that can cost more than the second thread brings. Whether it does is
measured: when other processes are busy, a few steps are run with one thread less, and the faster number stays until
they are done. The tokens are the same with any number (``step.N_PARTS``).
"""

from __future__ import annotations

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


class Turnout:
    """One model's threads over time, whatever runs it has: ``run`` counts and chooses."""

    def __init__(self) -> None:
        self.n_active = 0
        """Threads that take the next decode step; 0: all."""
        self._trial = 0
        self._steps: dict[int, deque[float]] = {}
        self._watch: BusyWatch | None = None
        self._looked_s = self._tried_s = -1e9
        self._lock = threading.Lock()

    def run(self, team: Squad, job: np.ndarray, *, alone: bool) -> None:
        """Run the job. ``alone``: a decode step, which may be given to fewer threads."""
        if not alone or team.n_threads == 1:
            team.run(job)
            return
        n = min(self._trial or self.n_active or team.n_threads, team.n_threads)
        seconds = team.run(job, n)
        with self._lock:
            self._steps.setdefault(n, deque(maxlen=5)).append(seconds)
            if self._trial:
                if n == self._trial and len(self._steps[n]) >= TRIAL_STEPS:
                    self._end_trial(team.n_threads)
            elif (now := time.perf_counter()) - self._looked_s > LOOK_EVERY_S:
                self._look(team.n_threads, now)

    def _look(self, n_all: int, now: float) -> None:
        """Read what others took since the last look, and begin a trial where it might help."""
        recent = self._watch is not None and now - self._looked_s < 4 * LOOK_EVERY_S
        share = self._watch.so_far()[0] if self._watch is not None and recent else 0.0
        self._looked_s = now
        self._watch = BusyWatch().__enter__()
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
