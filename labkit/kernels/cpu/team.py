"""Threads that stay awake between steps: a team that runs one compiled function together.

A step has some 150 barriers, so a fork and join from Python, or from a threading layer that sleeps, costs more than
the products it joins (numba's ``workqueue`` layer ran the same step at a third of the speed). Here the threads
are Python threads inside one compiled loop (``loops``) that holds no interpreter lock; they meet at counters in shared
memory, offer their core to others while they wait, and go to sleep when no step came for a while.
"""

from __future__ import annotations

import os
import threading
import time
from functools import lru_cache

import numpy as np

from labkit.kernels.cpu import machine_code
from labkit.kernels.cpu.cells import CLOCK, FUNCTION, GIVE_WAY, LINE, N_CELLS, N_THREADS, PARKED
from labkit.kernels.cpu.platform import system

PATIENCE_S = 2e-3
"""How long a thread looks for the next step before it goes to sleep: longer than a sampler takes."""
MAX_THREADS = 64


class Team:
    """``n_threads`` threads, the caller included."""

    _turn = threading.Lock()
    """One job at a time, of whatever team; others wait their turn. A model's working memory counts on it."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self.system = system()
        self._run, self._serve, self._publish = (machine_code.function(name) for name in ("run", "serve", "publish"))
        self._begin()

    def _begin(self) -> None:
        """Memory and threads; again in a forked process, where the threads of the first did not follow."""
        n_threads, self._process_id = self.n_threads, os.getpid()
        self._block = np.zeros(PARKED + LINE * (n_threads + 2), np.int64)
        self._at = (self._block.ctypes.data + 63) // 64 * 64
        self._awake = [threading.Semaphore(0) for _ in range(n_threads)]
        for rank in range(1, n_threads):
            threading.Thread(target=self._work, args=(rank,), name=f"labkit-team-{rank}", daemon=True).start()

    def run(self, job: np.ndarray, n_threads: int = 0) -> float:
        """Run ``job`` on every thread, or on the first ``n_threads``; returns its seconds when all are done."""
        n_threads = min(n_threads or self.n_threads, self.n_threads)  # more would be waited for in vain
        with self._turn:
            if self._process_id != os.getpid():
                self._begin()
            job[CLOCK], job[GIVE_WAY], job[N_THREADS] = self.system.clock, self.system.give_way, n_threads
            began = time.perf_counter()
            asleep = self._publish(self._at, job.ctypes.data, n_threads)
            for rank in range(1, n_threads):
                if asleep >> rank & 1:
                    self._awake[rank].release()
            self._run(0, self._at)
            return time.perf_counter() - began

    def rouse(self) -> None:
        """Wake the threads that sleep: what a timed step needs that does not follow another one closely."""
        job = np.zeros(N_CELLS, np.int64)
        job[FUNCTION] = machine_code.address("meet")
        self.run(job)

    def _work(self, rank: int) -> None:
        seen, patience = 0, int(PATIENCE_S / self.system.tick_s)
        while seen >= 0:
            seen = self._serve(rank, self._at, seen, self.system.clock, self.system.give_way, patience)
            if seen >= 0:
                self._awake[rank].acquire()


def _after_fork() -> None:
    """Another thread of the first process may have held the lock; none of this one does."""
    Team._turn = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@lru_cache(maxsize=4)
def team(n_threads: int) -> Team:
    """The process's team of this size: threads are made once, as torch makes its own."""
    return Team(min(n_threads, MAX_THREADS))
