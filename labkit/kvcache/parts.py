"""What a layer asks a cache to keep, and the pieces of a step: the words that caches and attention share."""

from __future__ import annotations

from dataclasses import dataclass


class CacheFull(ValueError):
    """There is no room for the step's tokens. Nothing was stored: free a sequence and try again."""


@dataclass(frozen=True)
class Entry:
    """One tensor that a layer stores per token, e.g. ``Entry("k", (G, D))``."""

    name: str
    shape: tuple[int, ...]

    @property
    def n_values(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n


@dataclass(frozen=True)
class LayerEntries:
    """What one layer asks its cache to keep, and how far back its tokens see."""

    entries: tuple[Entry, ...]
    window: int | None = None
    n_sinks: int = 0
    tokens_per_entry: int = 1

    @property
    def values_per_token(self) -> float:
        return sum(entry.n_values for entry in self.entries) / self.tokens_per_entry


@dataclass(frozen=True)
class Segment:
    """The rows of a step that belong to one sequence."""

    sequence_id: int
    row: int
    n_new: int
    n_past: int

    @property
    def n_total(self) -> int:
        return self.n_past + self.n_new

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.n_new)
