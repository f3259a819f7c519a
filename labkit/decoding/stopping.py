"""When the text ends: stop strings that may arrive split over several tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on as soon as it cannot be the beginning of a stop string.

    >>> stop = StopStrings(["END"])
    >>> stop.push("one E"), stop.push("ither E"), stop.push("ND two"), stop.hit
    ('one ', 'Either ', '', True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or any(not isinstance(s, str) or not s for s in stops):
            raise ValueError(f"stop must be a list of non-empty strings, got {stops!r}.")
        self.stops = tuple(stops)
        self.hit = False
        self._held = ""

    def push(self, text: str) -> str:
        """The part of the text so far that is safe to show; "" once a stop string has appeared."""
        if self.hit or not self.stops:
            return "" if self.hit else text
        text = self._held + text
        found = min((at for at in (text.find(s) for s in self.stops) if at >= 0), default=-1)
        if found >= 0:
            self.hit, self._held = True, ""
            return text[:found]
        n_held = max(_overlap(text, s) for s in self.stops)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        """What was still held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
