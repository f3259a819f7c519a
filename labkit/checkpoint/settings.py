"""A checkpoint's config, read with defaults, ranges and errors that name the key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

MAX_COUNT = 2**31 - 1
"""No count in a real config comes near; a corrupted one does."""


class Settings:
    """``config.json`` (or what GGUF metadata says in the same words), as typed values.

    An absent key falls back to the family's own default, as in transformers; a null is a null (Mistral's
    ``sliding_window: null`` means no window, not the default one). A value that is needed and missing, of the
    wrong type or out of range raises ValueError.
    """

    def __init__(self, values: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None) -> None:
        self._values = {**(defaults or {}), **values}

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is; ``default`` when absent or null."""
        value = self._values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_COUNT) -> int:
        """A whole number between ``low`` and ``high``, both included."""
        value = self._required(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"config: {key} is {value!r}, but must be a whole number from {low} to {high}.")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        return as_number(key, self._required(key, default))

    def optional_number(self, key: str) -> float | None:
        """A finite number above zero, or None."""
        return None if self.get(key) is None else self.number(key)

    def optional_count(self, key: str) -> int | None:
        """A whole number above zero, or None."""
        return None if self.get(key) is None else self.count(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or False."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"config: {key} is {value!r}, but must be true or false.")
        return value

    def table(self, key: str) -> dict[str, Any]:
        """A nested object; empty when absent."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise ValueError(f"config: {key} is {value!r}, but must be an object.")
        return dict(value)

    def per_layer(self, key: str, n_layers: int) -> list[Any] | None:
        """A list with one entry a layer, or None when absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) < n_layers:
            raise ValueError(f"config: {key} must list one value for each of the {n_layers} layers.")
        return list(value[:n_layers])

    def indices(self, key: str) -> list[int]:
        """A list of layer numbers; empty when absent."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise ValueError(f"config: {key} is {value!r}, but must be a list of layer numbers.")
        return value

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"config: {key} is missing, and this family has no default for it.")
        return value


def as_number(key: str, value: Any) -> float:
    """``value`` as a float, checked to be finite and above zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"config: {key} is {value!r}, but must be a number above 0.")
    return float(value)
