"""A run from the outside: the handle on a generation under way, and what it leaves when it has ended."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from labkit.perf.trace import Trace


@dataclass(frozen=True)
class Completion:
    """A finished run. ``finish_reason``: "stop" (end of text or a stop string), "length" or "cancelled"."""

    text: str
    token_ids: list[int]
    finish_reason: str
    trace: Trace


class Worker(Protocol):
    """What a run needs of whoever does the work."""

    stop_event: threading.Event
    pieces: queue.SimpleQueue[str | None]
    text: list[str]
    cache: Any

    def use_cache(self, choice: Any) -> None: ...

    def loop(self) -> Completion: ...

    def trace(self) -> Trace: ...


class Run:
    """A generation under way in its own thread. Iterate it for text; ``stop()`` ends it; ``result()`` waits."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._completion: Completion | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="labkit-run", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._completion = self._worker.loop()
        except BaseException as error:  # noqa: BLE001 - re-raised by result()
            self._error = error
        finally:
            self._worker.pieces.put(None)

    def __iter__(self) -> Iterator[str]:
        """Text pieces as they come. Raises what the worker raised; an interrupt of the reader stops the run."""
        try:
            while (piece := self._worker.pieces.get()) is not None:
                yield piece
        except (KeyboardInterrupt, GeneratorExit):
            self.stop()
            raise
        self._worker.pieces.put(None)  # so that a second iteration ends too
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Ask the run to end after the layer it is in. What it has written stays."""
        self._worker.stop_event.set()

    def use_cache(self, choice: Any) -> None:
        """Switch to another KV cache between two tokens. The new one is filled by one step over all tokens so far, so
        the text stays what it would have been. Raises ValueError that lists the kinds."""
        self._worker.use_cache(choice)

    def cache_usage(self) -> Any:
        """What the cache's bytes are used for right now (``labkit.kvcache.Usage``); None before it is there."""
        cache = self._worker.cache
        return None if cache is None else cache.usage()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._worker.text)

    def snapshot(self) -> Trace:
        """The trace so far."""
        return self._worker.trace()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end. Re-raises the worker's exception; TimeoutError after ``timeout`` seconds."""
        try:
            self._thread.join(timeout)
        except KeyboardInterrupt:
            self.stop()
            raise
        if self._thread.is_alive():
            raise TimeoutError(f"the run is still going after {timeout} s; stop() ends it.")
        if self._error is not None:
            raise self._error
        assert self._completion is not None
        return self._completion
