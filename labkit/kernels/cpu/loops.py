# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""What a team's threads run between jobs, and how one is announced to them (``team``)."""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.cpu.barrier import SPINS, barrier
from labkit.kernels.cpu.cells import (
    EACH,
    FUNCTION,
    GIVE_WAY,
    JOB,
    LINE,
    N_CELLS,
    N_THREADS,
    PARKED,
    SEQUENCE,
)
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.rowwise import array_at
from labkit.kernels.cpu.simd import atomic_read, atomic_swap, call_job, give_way, pause, ticks


@jit
def run(rank, team):
    """This thread's part of the job that the team's block points to."""
    job = atomic_read(team + 8 * JOB)
    cells = carray(array_at(job), (N_CELLS,), np.int64)
    call_job(cells[FUNCTION], rank, team, job)


@jit
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


@jit
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
