"""Compiling in a process of its own, which a run beside it does not wait for: it has another interpreter's lock and low
priority. It leaves its functions in files, also when whoever asked for them has ended meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from labkit.kernels.cpu import code_files, tiers
from labkit.kernels.cpu.signatures import SIGNATURES

ENOUGH_CORES = 4
"""From here on the longest function has a second process; together they do more, since parts of it are compiled in
both."""
WAIT_S = 0.1


def compile_all(progress: Callable[[int], None]) -> None:
    """Leave every function in a file of its own (``code_files.parts``), where there is a folder for it."""
    if not code_files.can_keep():
        return
    had = code_files.parts(SIGNATURES)
    missing = [name for name in SIGNATURES if name not in had]
    n_aside = 1 if (os.cpu_count() or 1) >= ENOUGH_CORES else 0
    split = max(0, len(missing) - n_aside)
    running = [_begin(names) for names in (missing[:split], missing[split:]) if names]
    while running:
        progress(code_files.count_parts(SIGNATURES))
        time.sleep(WAIT_S)
        running = [process for process in running if process.poll() is None]
    progress(code_files.count_parts(SIGNATURES))


def _begin(names: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "labkit.kernels.cpu.compiling", *names],
        cwd=Path(__file__).parents[3],
        env=os.environ | tiers.for_numba(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # an interrupt of the one who waits is not theirs
        creationflags=getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0),
    )
