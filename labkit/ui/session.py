"""One model a process, shared by every panel of a page: loading it twice would cost memory that Binder lacks."""

from __future__ import annotations

import gc
import threading
from typing import Any

DEFAULT_MODEL = "smollm2-135m-instruct"


class ModelShelf:
    """Keeps the model that was asked for last; asking for another lets the first one go.

    Panels that still run the first keep it alive until they end. Thread-safe: two panels that ask at once
    load once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: tuple[Any, ...] | None = None
        self._model: Any = None

    def holds(self, name: str = DEFAULT_MODEL, **options: Any) -> bool:
        return self._key == _key(name, options)

    def peek(self, name: str = DEFAULT_MODEL, **options: Any) -> Any:
        """The model if it is at hand, else None; never loads, never waits."""
        key, model = self._key, self._model
        return model if key == _key(name, options) else None

    def get(self, name: str = DEFAULT_MODEL, *, progress: Any = None, **options: Any) -> Any:
        """``labkit.load(name, **options)``, or the model at hand when it was loaded with the same words. ``progress``
        hears of a calibration and may cancel it."""
        import labkit

        with self._lock:
            key = _key(name, options)
            if self._key != key:
                self._key, self._model = None, None
                gc.collect()
                told = {} if progress is None else {"progress": progress}
                self._model = labkit.load(name, **options, **told)
                self._key = key
            return self._model

    def put(self, model: Any, name: str = DEFAULT_MODEL, **options: Any) -> None:
        """Hold a model that was made another way, under the words that would load it."""
        with self._lock:
            self._key, self._model = _key(name, options), model

    def clear(self) -> None:
        with self._lock:
            self._key, self._model = None, None
        gc.collect()


def _key(name: str, options: dict[str, Any]) -> tuple[Any, ...]:
    defaults = {"device": "auto", "dtype": "auto", "weights": None, "backend": "auto"}
    return (name, *sorted((k, repr(v)) for k, v in {**defaults, **options}.items()))


shelf = ModelShelf()
"""The process's one shelf."""
