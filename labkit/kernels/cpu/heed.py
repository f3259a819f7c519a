"""Somebody who looks, while a compiled function runs, whether the run is to be stopped.

One thread for the whole process, asleep between prompts: to start one for each would cost a short prompt milliseconds
on a machine whose cores are all taken.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np

EVERY_S = 0.02
"""How often somebody looks."""


class _Watch:
    """One run to be looked at: ``cells[at]`` becomes 1 when it is to be stopped."""

    def __init__(self, should_stop: Callable[[], bool], cells: np.ndarray, at: int) -> None:
        self.should_stop, self.cells, self.at = should_stop, cells, at
        self._over = threading.Event()
        self._lock = threading.Lock()

    def look(self) -> None:
        """Until the run is over, or to be stopped."""
        while not self._over.wait(EVERY_S):
            if self.should_stop():
                with self._lock:
                    if not self._over.is_set():
                        self.cells[self.at] = 1
                return

    def end(self) -> None:
        """From here on the cell is not written any more."""
        with self._lock:
            self._over.set()


@lru_cache(maxsize=1)
def _watches() -> queue.SimpleQueue[_Watch]:
    """What the process's one looking thread takes its work from."""
    waiting: queue.SimpleQueue[_Watch] = queue.SimpleQueue()

    def work() -> None:
        while True:
            waiting.get().look()

    threading.Thread(target=work, name="labkit-heed", daemon=True).start()
    return waiting


@contextmanager
def heeding(should_stop: Callable[[], bool], cells: np.ndarray, at: int) -> Iterator[None]:
    """Within the block, ``cells[at]`` is set to 1 soon after ``should_stop()`` has become true."""
    watch = _Watch(should_stop, cells, at)
    _watches().put(watch)
    try:
        yield
    finally:
        watch.end()
