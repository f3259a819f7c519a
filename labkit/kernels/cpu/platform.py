"""What a compiled step needs of the operating system: a clock and a way to leave its core to others, as addresses.

Both are called from compiled code that holds no interpreter lock, so Python's own functions would not do.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import lru_cache

WINDOWS = sys.platform == "win32"
NAP_US = 20
CLOCK_ID = 6 if sys.platform == "darwin" else 1
"""CLOCK_MONOTONIC."""


@dataclass(frozen=True)
class System:
    """Addresses of the clock and of what gives the core away, and the seconds of one tick."""

    clock: int
    give_way: int
    tick_s: float


@lru_cache(maxsize=1)
def system() -> System:
    """Looked up once a process."""
    if WINDOWS:
        kernel32 = ctypes.windll.kernel32  # type: ignore[attr-defined]
        frequency = ctypes.c_int64()
        kernel32.QueryPerformanceFrequency(ctypes.byref(frequency))
        return System(
            _address(kernel32.QueryPerformanceCounter), _address(kernel32.SwitchToThread), 1.0 / frequency.value
        )
    libc = ctypes.CDLL(None)
    # A nap and no sched_yield: whoever yields beside a busy program is behind it for a whole time slice, at each of a
    # step's barriers; whoever slept is let in at once.
    return System(_address(libc.clock_gettime), _address(libc.usleep), 1e-9)


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
