"""Was somebody else using the machine? The share of our cores that other processes took while we measured."""

from __future__ import annotations

import os
import time
from types import TracebackType

import psutil


class BusyWatch:
    """``with BusyWatch() as watch: ...`` then ``watch.share``: 0 (ours alone) to 1 (nothing left for us).

    Counts every core that this process may use, and a hypervisor's stolen time as somebody else's.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self.seconds = 0.0

    def __enter__(self) -> BusyWatch:
        self._start = self._now()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.share, self.seconds = self.so_far()

    def so_far(self) -> tuple[float, float]:
        """(share, seconds) since the block began."""
        wall, busy, own = (b - a for a, b in zip(self._start, self._now(), strict=True))
        if wall <= 0:
            return 0.0, 0.0
        return min(1.0, max(0.0, (busy - own) / (wall * len(_cores())))), wall

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Wall clock, busy time of our cores, and this process's own processor time, in seconds."""
        per_core = psutil.cpu_times(percpu=True)
        busy = 0.0
        for core in _cores():
            times = per_core[core]
            busy += sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
        own = psutil.Process().cpu_times()
        return time.perf_counter(), busy, own.user + own.system


def busy_now(seconds: float = 0.25) -> float:
    """The share that others take at this moment, watched for a quarter of a second."""
    with BusyWatch() as watch:
        time.sleep(seconds)
    return watch.share


def _cores() -> list[int]:
    """The cores that this process may run on."""
    n_cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        return [core for core in sorted(os.sched_getaffinity(0)) if core < n_cores]
    return list(range(n_cores))
