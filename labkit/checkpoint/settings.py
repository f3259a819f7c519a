"""A checkpoint's config, read with defaults, ranges and errors that name the key."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_COUNT = 2**31 - 1
"""No count in a real config comes near; a corrupted one does."""


SOUNDS_LIKE_ARITHMETIC = re.compile(
    r"rope|rotary|scal|softcap|logit_cap|norm|window|bias|multiplier|alibi|clip|sink|factor|sliding|residual"
)
"""Keys of a config that are refused when nothing here knows them: leaving one out would change every number."""
HARMLESS = frozenset(
    (
        "initializer_factor",  # training's first weights
        "layer_norm_eps",  # beside rms_norm_eps, in configs of Llama's family
        "scale_attention_softmax_in_fp32", "attention_softmax_in_fp32",  # labkit's softmax is always in float32
        "original_max_position_embeddings",
        "max_window_layers",
    )
)  # fmt: skip


class Settings:
    """``config.json`` (or what GGUF metadata says in the same words), as typed values.

    An absent key falls back to the family's own default, as in transformers; a null is a null (Mistral's
    ``sliding_window: null`` means no window, not the default one). A value that is needed and missing, of the
    wrong type or out of range raises ValueError. It remembers which keys were asked for (``check_all_read``).
    """

    def __init__(self, values: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None) -> None:
        self._stated = values
        self._values = {**(defaults or {}), **values}
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is; ``default`` when absent or null."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def decided(self, *keys: str) -> None:
        """These keys say nothing more: another one has decided (a window that is switched off)."""
        self._read.update(keys)

    def check_all_read(self, family: str) -> None:
        """Raise ValueError for a key that nobody asked for, is set, and sounds as if it changed the arithmetic."""
        refuse_unknown(set(self._stated) - self._read, self._stated, f"config: {family}")

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


def refuse_unknown(keys: Iterable[str], values: Mapping[str, Any], whose: str) -> None:
    """Raise ValueError when one of the unread ``keys`` is set and sounds as if it changed the arithmetic."""
    sounds = [key for key in sorted(map(str, keys)) if SOUNDS_LIKE_ARITHMETIC.search(key) and key not in HARMLESS]
    if unknown := [key for key in sounds if not is_neutral(key, values.get(key))]:
        shown = ", ".join(f"{key} = {values[key]!r:.60}" for key in unknown[:6])
        raise ValueError(
            f"{whose} with {shown} is not a model that labkit knows. The name sounds as if it changed the arithmetic, "
            "and leaving it out would give wrong numbers without a word, so the file is refused."
        )


def is_neutral(key: str, value: Any) -> bool:
    """Whether a setting changes nothing: off, absent, or a factor of 1."""
    if value is None or value is False or value in ("", "none", [], {}):
        return True
    a_factor = re.search("scal|multiplier|factor", key) is not None
    return a_factor and isinstance(value, (int, float)) and value == 1


def as_number(key: str, value: Any) -> float:
    """``value`` as a float, checked to be finite and above zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"config: {key} is {value!r}, but must be a number above 0.")
    return float(value)
