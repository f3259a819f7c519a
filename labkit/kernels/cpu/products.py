"""Who takes which rows of a product."""

from __future__ import annotations

from labkit.kernels.cpu.jit import jit


@jit
def share(n, unit, rank, n_threads):
    """This thread's part of n rows: [first, end), whole units."""
    units = (n + unit - 1) // unit
    first = (units * rank) // n_threads * unit
    end = (units * (rank + 1)) // n_threads * unit
    return min(first, n), min(end, n)
