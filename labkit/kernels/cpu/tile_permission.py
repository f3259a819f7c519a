"""Linux keeps AMX's tiles from a process until it asks: they make room for 8 KB more in every saved state."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache

ARCH_PRCTL, REQUEST, TILES = 158, 0x1023, 18
"""The system call on x86-64, ARCH_REQ_XCOMP_PERM, and the number of the tiles' state."""


@lru_cache(maxsize=1)
def granted() -> bool:
    """Ask, once a process: for all its threads, and for those that it starts or forks. False where the system does not
    know the tiles, or a thread's signal stack is too small for them."""
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST, TILES) == 0
