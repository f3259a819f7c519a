"""Work that must not freeze the page: a background thread, an event that stops it, and a ticker.

A button handler that loops would ignore the Stop button until it ends, so ``Runner.start`` returns at once.
The work changes plain Python state; every 100 ms the ticker calls ``on_tick`` to publish the latest of it,
so a fast loop never floods the page. Google Colab delivers no messages from other threads, so there the work
runs in the foreground and ticks as it reports progress; a kernel interrupt stops it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from labkit.perf import workers

TICK_S = 0.1
SETTLE_S = 2.0


class Stopped(Exception):
    """The reader pressed Stop."""


def in_foreground() -> bool:
    """True where a thread's widget updates do not reach the page."""
    return bool(os.environ.get("COLAB_NOTEBOOK_ID") or os.environ.get("LABKIT_FOREGROUND"))


def _nothing(*_: Any) -> None:
    pass


class Job:
    """What the work sees of its run: whether to stop, and where to say how far it is."""

    def __init__(self, on_tick: Callable[[Job], None] = _nothing) -> None:
        self.stop_event = threading.Event()
        self.ended = threading.Event()
        """Set when all is published. (An interrupted ``Thread.join`` of Python 3.11 takes the thread for ended.)"""
        self.fraction = -1.0
        self.message = ""
        self.started_s = time.perf_counter()
        self.result: Any = None
        self.error: BaseException | None = None
        self._on_tick = on_tick
        self._ticked_s = 0.0
        self.foreground = in_foreground()

    @property
    def stopped(self) -> bool:
        return self.stop_event.is_set()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s

    def check(self) -> None:
        """Raise ``Stopped`` when Stop was pressed: call it in every loop."""
        if self.stopped:
            raise Stopped

    def progress(self, fraction: float, message: str = "") -> None:
        """Say how far the work is, 0 to 1 (below 0: unknown), and stop here when asked to."""
        self.fraction, self.message = fraction, message or self.message
        self.tick()
        self.check()

    def tick(self) -> None:
        """In the foreground, publish when a tick is due; in the background the ticker does."""
        if self.foreground and time.perf_counter() - self._ticked_s >= TICK_S:
            self._ticked_s = time.perf_counter()
            self._on_tick(self)


class Runner:
    """Runs one piece of work at a time.

    ``start(work)`` calls ``work(job)``; ``on_tick(job)`` publishes state while it runs; ``on_end(job)`` comes
    once at the end, with ``job.result``, ``job.error`` or ``job.stopped`` set. ``wait()`` re-raises the error.
    """

    def __init__(self, *, on_tick: Callable[[Job], None] = _nothing, on_end: Callable[[Job], None] = _nothing) -> None:
        self.on_tick, self.on_end = on_tick, on_end
        self.job: Job | None = None
        self._lock = threading.Lock()

    @property
    def running(self) -> bool:
        return self.job is not None and not self.job.ended.is_set()

    def start(self, work: Callable[[Job], Any]) -> bool:
        """Begin; False when something is still running (a second click on Run does nothing)."""
        with self._lock:
            if self.running:
                return False
            job = self.job = Job(self.on_tick)
            if not job.foreground:
                workers.begin(partial(self._run, job, work), name="labkit-panel", stop=job.stop_event.set)
                return True
        try:
            self._work(job, work)
            self.on_end(job)
        finally:
            job.ended.set()
        return True

    def stop(self) -> None:
        if self.job is not None:
            self.job.stop_event.set()

    def wait(self, timeout: float | None = 120.0) -> Any:
        """Block until the run ends; its result, or its exception raised here. A kernel interrupt stops the run."""
        if self.job is None:
            raise ValueError("nothing has run yet: press Run first.")
        try:
            self.job.ended.wait(timeout)
        except KeyboardInterrupt:
            self.stop()
            self.job.ended.wait(SETTLE_S)  # so that the next Run is not taken for a second click
            raise
        if self.running:
            raise TimeoutError(f"the run is still going after {timeout} s.")
        if self.job.error is not None:
            raise self.job.error
        return self.job.result

    def _run(self, job: Job, work: Callable[[Job], Any]) -> None:
        worker = workers.begin(partial(self._work, job, work), name="labkit-work", stop=job.stop_event.set)
        while True:
            worker.join(TICK_S)
            if not worker.is_alive():
                break
            self._publish(self.on_tick, job)
        self._publish(self.on_end, job)
        job.ended.set()

    @staticmethod
    def _publish(callback: Callable[[Job], None], job: Job) -> None:
        try:
            callback(job)
        except Exception as error:  # noqa: BLE001 - kept for wait(), which raises it
            job.error = job.error or error
            job.stop_event.set()

    @staticmethod
    def _work(job: Job, work: Callable[[Job], Any]) -> None:
        try:
            job.result = work(job)
        except Stopped:
            job.stop_event.set()
        except KeyboardInterrupt:
            job.stop_event.set()
            if job.foreground:
                raise
        except Exception as error:  # noqa: BLE001 - kept for wait(), which raises it
            job.error = error
