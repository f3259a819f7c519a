"""What the scripts here share: the most memory that this process has held."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil


def peak_bytes() -> int:
    """Peak resident bytes. On Linux not ``ru_maxrss``: a new process inherits that of whoever started it."""
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return psutil.Process().memory_info().peak_wset
