"""When the text ends: stop strings that may arrive split over several tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on as soon as it cannot be the beginning of a stop string.

    A stop string is looked for in what the model wrote, special tokens included (``hidden``: read, never shown).

    >>> stop = StopStrings(["END"])
    >>> stop.push("one E"), stop.push("ither E"), stop.push("ND two"), stop.hit
    ('one ', 'Either ', '', True)
    >>> stop = StopStrings(["<|im_end|>"])
    >>> stop.push("Yes."), stop.push("", hidden="<|im_end|>"), stop.hit
    ('Yes.', '', True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or any(not isinstance(s, str) or not s for s in stops):
            raise ValueError(f"stop must be a list of non-empty strings, got {stops!r}.")
        self.stops = tuple(stops)
        self.hit = False
        self._held: list[tuple[str, bool]] = []  # each character that may begin a stop string, and whether it is shown

    def push(self, text: str, hidden: str = "") -> str:
        """The part of the text so far that is safe to show; "" once a stop string has appeared.

        ``hidden`` is the text of a special token, which comes after ``text``.
        """
        if self.hit or not self.stops:
            return "" if self.hit else text
        chars = [*self._held, *((char, True) for char in text), *((char, False) for char in hidden)]
        written = "".join(char for char, _ in chars)
        found = min((at for at in (written.find(s) for s in self.stops) if at >= 0), default=-1)
        if found >= 0:
            self.hit, self._held = True, []
            return _shown(chars[:found])
        n_safe = len(chars) - max(_overlap(written, s) for s in self.stops)
        self._held = chars[n_safe:]
        return _shown(chars[:n_safe])

    def flush(self) -> str:
        """What was still held back, at the end of the text."""
        held, self._held = self._held, []
        return _shown(held)


def _shown(chars: list[tuple[str, bool]]) -> str:
    return "".join(char for char, shown in chars if shown)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
