# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Where a team's threads meet, and the clock that its first thread reads between the parts of a step."""

from __future__ import annotations

from labkit.kernels.cpu.cells import ARRIVED, GENERATION
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.simd import X86, atomic_add, atomic_read, atomic_swap, give_way, pause, ticks

SPINS = 2000 if X86 else 40_000
"""Looks at a flag before the core is left to others: some 60 microseconds, with x86's pause between two looks. In a
quiet step nobody is so late."""


@jit
def barrier(team, n_threads, give_way_at):
    """Wait until all of the team's threads are here."""
    if n_threads == 1:
        return
    generation = atomic_read(team + 8 * GENERATION)
    if atomic_add(team + 8 * ARRIVED, 1) == n_threads - 1:
        atomic_swap(team + 8 * ARRIVED, 0)
        atomic_add(team + 8 * GENERATION, 1)
        return
    spins = 0
    while atomic_read(team + 8 * GENERATION) == generation:
        spins += 1
        if spins < SPINS:
            pause()
        else:
            give_way(give_way_at)


@jit
def charge(rank, phases, phase, clock, since):
    """Rank 0 adds the time since ``since`` to a phase; returns now."""
    if rank != 0:
        return since
    now = ticks(clock)
    phases[phase] += now - since
    return now
