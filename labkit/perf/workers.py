"""Threads that compute: none is left running when the interpreter ends.

A daemon thread inside a tensor operation while Python takes itself apart aborts the process ("terminate called ...").
So whoever starts a thread that computes says here how to stop it; at exit all are asked to stop, and waited for.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

EXIT_S = 1.0
"""How long the end of the process waits for all threads together: a step asks at each layer whether to stop."""
_SETTLE_S = 0.01
"""For threads of compiled steps to fall asleep: they look for the next step for two milliseconds."""

_stops: dict[threading.Thread, Callable[[], None]] = {}


def begin(work: Callable[[], None], *, name: str, stop: Callable[[], None] | None = None) -> threading.Thread:
    """Run ``work`` in a thread; ``stop`` asks it to end soon. Started before this returns.

    Without ``stop`` it is ended at its next line of Python: for a compiler, which asks nobody whether to go on."""

    def until_done() -> None:
        try:
            with suppress(SystemExit):
                work()
        finally:
            _stops.pop(threading.current_thread(), None)

    thread = threading.Thread(target=until_done, name=name, daemon=True)
    _stops[thread] = stop or partial(_end_at_next_line, thread)
    thread.start()
    return thread


def _end_at_next_line(thread: threading.Thread) -> None:
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def end_all(patience_s: float = EXIT_S) -> None:
    """Stop every thread and wait until it has ended, at most ``patience_s`` for all."""
    running = list(_stops.items())
    for _, stop in running:
        with suppress(Exception):
            stop()
    deadline = time.monotonic() + patience_s
    for thread, _ in running:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
    if running:
        time.sleep(_SETTLE_S)


def _after_fork() -> None:
    """All threads but one stay with the first process: ours, and those that PyTorch's operations would wait for."""
    _stops.clear()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


atexit.register(end_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
