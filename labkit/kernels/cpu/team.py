# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Threads that stay awake between steps: a team that runs one compiled function together.

A step has some 150 barriers, so a fork and join from Python, or from a threading layer that sleeps, costs more than
the products it joins (numba's ``workqueue`` layer ran the same step at a third of the speed). Here the threads
are Python threads inside one compiled loop that holds no interpreter lock; they meet at counters in shared memory,
offer their core to others while they wait, and go to sleep when no step came for a while.
"""

from __future__ import annotations

import threading
import time
from functools import lru_cache

import numpy as np
from numba import carray, cfunc, int64

from labkit.kernels.cpu import stretch
from labkit.kernels.cpu.jit import entry
from labkit.kernels.cpu.matmul import matmul
from labkit.kernels.cpu.platform import system
from labkit.kernels.cpu.prefill import prefill
from labkit.kernels.cpu.rowwise import array_at
from labkit.kernels.cpu.simd import atomic_read, atomic_swap, call_job, give_way, pause, ticks
from labkit.kernels.cpu.step import (
    CLOCK,
    FUNCTION,
    GIVE_WAY,
    JOB,
    LINE,
    N_CELLS,
    N_THREADS,
    PARKED,
    SEQUENCE,
    SPINS,
    barrier,
    decode,
)

PATIENCE_S = 2e-3
"""How long a thread looks for the next step before it goes to sleep: longer than a sampler takes."""
MAX_THREADS = 64
EACH = 1024
"""A job's number in the sequence is a multiple of this, plus how many threads it is for: both are read at once."""


@entry
def run(rank, team):
    """This thread's part of the job that the team's block points to."""
    job = atomic_read(team + 8 * JOB)
    cells = carray(array_at(job), (N_CELLS,), np.int64)
    call_job(cells[FUNCTION], rank, team, job)


@entry
def serve(rank, team, seen, clock, give_way_at, patience):
    """A worker's loop: run each job as it is published; return the last one's number when none came for a while."""
    parked = team + 8 * (PARKED + LINE * rank)
    spins, since = 0, ticks(clock)
    while True:
        now = atomic_read(team + 8 * SEQUENCE)
        if now != seen:
            seen = now
            if atomic_read(team + 8 * JOB) == 0:
                return -1
            if rank < now % EACH:  # else the job is not this thread's to look at: the next one may be written there now
                run(rank, team)
                spins, since = 0, ticks(clock)
            continue
        spins += 1
        if spins < SPINS:
            pause()
            continue
        give_way(give_way_at)
        if ticks(clock) - since > patience:
            atomic_swap(parked, 1)
            if atomic_read(team + 8 * SEQUENCE) == seen:
                return seen
            atomic_swap(parked, 0)


@entry
def publish(team, job, n_threads):
    """Announce a job for so many threads; returns a bit for each that sleeps and must be woken."""
    atomic_swap(team + 8 * JOB, job)
    atomic_swap(team + 8 * SEQUENCE, (atomic_read(team + 8 * SEQUENCE) // EACH + 1) * EACH + n_threads)
    asleep = 0
    for rank in range(1, n_threads):
        if atomic_swap(team + 8 * (PARKED + LINE * rank), 0) == 1:
            asleep |= 1 << rank
    return asleep


def meet(rank, team, job):
    """Every thread comes, and goes on looking for the next job."""
    cells = carray(array_at(job), (N_CELLS,), np.int64)
    barrier(team, cells[N_THREADS], cells[GIVE_WAY])


@lru_cache(maxsize=4)
def compiled(name: str) -> int:
    """The address of a job's function, compiled or loaded from the disk cache: seconds the first time."""
    function = {"decode": decode, "prefill": prefill, "matmul": matmul, "meet": meet}[name]
    made = cfunc("void(int64, int64, int64)", nopython=True, error_model="numpy", cache=True)(function)
    _kept.append(made)
    return made.address


_kept: list[object] = []
"""Compiled functions stay in memory as long as their addresses may be called."""


def compile_all() -> None:
    """Compile everything a team runs, on any thread."""
    publish.compile((int64,) * 3)
    run.compile((int64,) * 2)
    serve.compile((int64,) * 6)
    compiled("decode")
    compiled("prefill")
    compiled("matmul")
    compiled("meet")
    stretch.address()


class Team:
    """``n_threads`` threads, the caller included."""

    _turn = threading.Lock()
    """One job at a time, of whatever team; others wait their turn. A model's working memory counts on it."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._block = np.zeros(PARKED + LINE * (n_threads + 2), np.int64)
        self._at = (self._block.ctypes.data + 63) // 64 * 64
        self._awake = [threading.Semaphore(0) for _ in range(n_threads)]
        self.system = system()
        for rank in range(1, n_threads):
            threading.Thread(target=self._work, args=(rank,), name=f"labkit-team-{rank}", daemon=True).start()

    def run(self, job: np.ndarray, n_threads: int = 0) -> float:
        """Run ``job`` on every thread, or on the first ``n_threads``; returns its seconds when all are done."""
        n_threads = min(n_threads or self.n_threads, self.n_threads)  # more would be waited for in vain
        with self._turn:
            job[CLOCK], job[GIVE_WAY], job[N_THREADS] = self.system.clock, self.system.give_way, n_threads
            began = time.perf_counter()
            asleep = publish(self._at, job.ctypes.data, n_threads)
            for rank in range(1, n_threads):
                if asleep >> rank & 1:
                    self._awake[rank].release()
            run(0, self._at)
            return time.perf_counter() - began

    def rouse(self) -> None:
        """Wake the threads that sleep: what a timed step needs that does not follow another one closely."""
        job = np.zeros(N_CELLS, np.int64)
        job[FUNCTION] = compiled("meet")
        self.run(job)

    def _work(self, rank: int) -> None:
        seen, patience = 0, int(PATIENCE_S / self.system.tick_s)
        while seen >= 0:
            seen = serve(rank, self._at, seen, self.system.clock, self.system.give_way, patience)
            if seen >= 0:
                self._awake[rank].acquire()


@lru_cache(maxsize=4)
def team(n_threads: int) -> Team:
    """The process's team of this size: threads are made once, as torch makes its own."""
    return Team(min(n_threads, MAX_THREADS))
