"""Somebody who looks, while compiled functions run, whether their runs are to be stopped.

One thread for the whole process, asleep between prompts: to start one for each would cost a short prompt milliseconds
on a machine whose cores are all taken.
"""

from __future__ import annotations

import os
import threading
import time
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
        self.error: BaseException | None = None

    def look(self) -> None:
        try:
            stop = self.should_stop()
        except BaseException as error:  # noqa: BLE001 - raised where the run is waited for
            self.error, stop = error, True
        if stop:
            self.cells[self.at] = 1


class _Lookout:
    """The thread, and the runs that it looks at."""

    def __init__(self) -> None:
        self._open: list[_Watch] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name="labkit-cancellation", daemon=True).start()

    def add(self, watch: _Watch) -> None:
        with self._changed:
            self._open.append(watch)
            self._changed.notify()

    def remove(self, watch: _Watch) -> None:
        """From here on its cell is not written any more."""
        with self._changed:
            self._open.remove(watch)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._open:
                    self._changed.wait()
            time.sleep(EVERY_S)
            with self._changed:
                for watch in self._open:
                    watch.look()


@lru_cache(maxsize=1)
def _lookout() -> _Lookout:
    return _Lookout()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lookout.cache_clear)  # its thread stayed with the first process


@contextmanager
def cancellable(should_stop: Callable[[], bool], cells: np.ndarray, at: int) -> Iterator[None]:
    """Within the block, ``cells[at]`` is set to 1 soon after ``should_stop()`` has become true. Raises at the end what
    ``should_stop`` raised."""
    watch = _Watch(should_stop, cells, at)
    _lookout().add(watch)
    try:
        yield
    finally:
        _lookout().remove(watch)
    if watch.error is not None:
        raise watch.error
