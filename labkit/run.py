"""A run from the outside: the handle on a generation under way, and what it leaves when it has ended."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
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
    prompt_ids: tuple[int, ...] = ()
    """As the model read it, with what a template or the tokenizer put around the text; empty from another machine."""


class Read(Protocol):
    """What a run reads, whoever writes it: a thread of this process, an engine for many, or a server elsewhere."""

    stop_event: threading.Event
    ended: threading.Event
    pieces: queue.SimpleQueue[str | None]
    text: list[str]
    completion: Completion | None
    error: BaseException | None


class Run:
    """A generation under way. Iterate it for text; ``stop()`` ends it; ``result()`` waits.

    ``trace`` gives the trace so far; ``engine`` is the one that works for this run alone, if there is one."""

    def __init__(self, sequence: Read, *, trace: Callable[[], Trace], engine: Any = None) -> None:
        self._sequence, self._trace, self._engine = sequence, trace, engine

    def __iter__(self) -> Iterator[str]:
        """Text pieces as they come. Raises what the worker raised; an interrupt of the reader stops the run."""
        pieces = self._sequence.pieces
        try:
            while (piece := pieces.get()) is not None:
                yield piece
        except (KeyboardInterrupt, GeneratorExit):
            self.stop()
            raise
        pieces.put(None)  # so that a second iteration ends too
        if self._sequence.error is not None:
            raise self._sequence.error

    def stop(self) -> None:
        """Ask the run to end after the layer it is in. What it has written stays."""
        self._sequence.stop_event.set()

    def use_cache(self, choice: Any) -> None:
        """Switch to another KV cache between two tokens. The new one is filled by one step over all tokens so far, so
        the text stays what it would have been. Raises ValueError that lists the kinds, or says that the cache is not
        this run's to switch."""
        if self._engine is None:
            raise ValueError("this run shares its cache with others, or has it on a server: it cannot be switched.")
        self._engine.use_cache(choice)

    def cache_usage(self) -> Any:
        """What the cache's bytes are used for right now (``labkit.kvcache.Usage``); None before it is there."""
        cache = None if self._engine is None else self._engine.cache
        return None if cache is None else cache.usage()

    @property
    def running(self) -> bool:
        return not self._sequence.ended.is_set()

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._sequence.text)

    def snapshot(self) -> Trace:
        """The trace so far."""
        return self._trace()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end. Re-raises the worker's exception; TimeoutError after ``timeout`` seconds."""
        try:
            ended = self._sequence.ended.wait(timeout)
        except KeyboardInterrupt:
            self.stop()
            raise
        if not ended:
            raise TimeoutError(f"the run is still going after {timeout} s; stop() ends it.")
        if self._sequence.error is not None:
            raise self._sequence.error
        assert self._sequence.completion is not None
        return self._sequence.completion
