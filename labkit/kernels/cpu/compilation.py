"""The state of the compiled functions: compiling takes about a minute, once on a machine, in the background."""

from __future__ import annotations

import os
import threading
import time
from functools import lru_cache

from labkit.kernels.cpu import machine_code
from labkit.perf.workers import begin


class Compilation:
    """The compiled functions' state: cold, compiling, ready, or failed with a reason."""

    def __init__(self) -> None:
        self.state = "cold"
        self.reason = ""
        self.seconds = 0.0
        self.n_functions, self.n_compiled = len(machine_code.SIGNATURES), 0
        self._lock = threading.Lock()
        self._done = threading.Event()

    def start(self) -> None:
        """Begin in the background, once."""
        with self._lock:
            if self.state == "cold":
                self.state = "compiling"
                begin(self._work, name="labkit-compile")

    def ready(self, timeout_s: float | None = 0.0) -> bool:
        """Whether the compiled step can run now, after waiting at most ``timeout_s`` (None: until it can)."""
        self.start()
        if not self._done.is_set() and (timeout_s is None or timeout_s > 0):
            self._done.wait(timeout_s)
        return self.state == "ready"

    def describe(self) -> str:
        """The state, as a sentence."""
        return {
            "cold": "Fast path: compiled in the background at the first run.",
            "compiling": "Fast path: compiling in the background (about a minute, once on this machine; "
            f"{self.n_compiled} of {self.n_functions} functions are done); plain PyTorch serves until then.",
            "ready": f"Fast path: ready (took {self.seconds:.1f} s).",
            "failed": f"Fast path: not available ({self.reason}); plain PyTorch serves.",
        }[self.state]

    def _work(self) -> None:
        began = time.perf_counter()
        try:
            machine_code.load(self._count)
            self.seconds = time.perf_counter() - began
            self.state = "ready"
        except Exception as error:  # noqa: BLE001 - whatever the compiler says is shown, and the reference serves on
            self.reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self.state = "failed"
        finally:
            self._done.set()

    def _count(self, n_compiled: int) -> None:
        self.n_compiled = n_compiled


@lru_cache(maxsize=1)
def compilation() -> Compilation:
    """The process's one compilation."""
    return Compilation()


def _after_fork() -> None:
    """The thread that compiles stayed with the first process: this one begins anew."""
    if not compilation()._done.is_set():
        machine_code._lock = threading.Lock()
        compilation.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
