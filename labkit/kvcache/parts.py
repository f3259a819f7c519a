"""What a layer asks a cache to keep, and the pieces of a step: the words that caches and attention share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ROLLBACK_TOKENS = 32
"""Tokens kept beyond a window, so that a rejected draft can be rolled back."""


class CacheFull(ValueError):
    """There is no room for the step's tokens. Nothing was stored: free a sequence and try again."""


@dataclass(frozen=True)
class Entry:
    """One kind of row that a layer keeps, e.g. ``Entry("k", (G, D))``: each entry has its own rate, window and dtype.

    With a ``rate`` of m, row i stands for the m tokens i m ... i m + m - 1, and comes to be once the last of them has
    (its block *closes*). What an open block will be made of is an entry too: the latest tokens' rows, in float32.
    """

    name: str
    shape: tuple[int, ...]
    rate: int = 1
    """Tokens that share one row."""
    window: int | None = None
    """How many of the latest rows are read again, this step's own included; None: all of them."""
    dtype: torch.dtype | None = None
    """None: the cache's."""
    d_value: int | None = None
    """The row is a key, and its first ``d_value`` numbers are the value too; None: it is no key by itself."""

    @property
    def n_values(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    def n_rows(self, n_tokens: int) -> int:
        """Rows in memory for a sequence of up to ``n_tokens``: a window is a ring with room to roll back."""
        n = n_tokens // self.rate
        return n if self.window is None else min(n, self.window + ROLLBACK_TOKENS)

    def nbytes(self, n_tokens: int, dtype: torch.dtype) -> int:
        """Bytes of those rows in a cache of ``dtype``."""
        return self.n_rows(n_tokens) * self.n_values * (self.dtype or dtype).itemsize


@dataclass(frozen=True)
class LayerEntries:
    """What one layer asks its cache to keep. ``window`` and ``n_sinks``: how far back the tokens of a layer that keeps
    a key and a value see; other layers say it entry by entry."""

    entries: tuple[Entry, ...]
    window: int | None = None
    n_sinks: int = 0

    @property
    def values_per_token(self) -> float:
        """Numbers that one more token adds, windows left out: they do not grow."""
        return sum(entry.n_values / entry.rate for entry in self.entries if entry.window is None)

    @property
    def is_pair(self) -> bool:
        """Whether it keeps one key and one value (heads, width) a token, the form that every kind of cache stores."""
        if [entry.name for entry in self.entries] != ["k", "v"]:
            return False
        k, v = self.entries
        plain = all(e.rate == 1 and e.window is None and e.dtype is None and e.d_value is None for e in self.entries)
        return plain and len(k.shape) == len(v.shape) == 2 and k.shape[0] == v.shape[0]


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

    def closed(self, rate: int) -> range:
        """The blocks of ``rate`` tokens whose last token is one of this step's."""
        return range(self.n_past // rate, self.n_total // rate)


def rows_of(segment: Segment, segments: tuple[Segment, ...], rate: int) -> slice:
    """Which of the rows that a step appends are this segment's, where ``rate`` tokens share one."""
    if rate == 1:
        return segment.rows
    before = sum(len(other.closed(rate)) for other in segments if other.row < segment.row)
    return slice(before, before + len(segment.closed(rate)))


def check_pairs(layers: Sequence[LayerEntries], kind: str) -> None:
    """Raise ValueError unless every layer keeps one key and one value a token, the form that most kinds store."""
    for layer_idx, layer in enumerate(layers):
        if not layer.is_pair:
            kept = ", ".join(f"{e.name} {e.shape}" + f" for {e.rate} tokens" * (e.rate > 1) for e in layer.entries)
            raise ValueError(
                f"layer {layer_idx} keeps {kept}; the {kind} cache stores one key and one value (heads, width) a token."
                " Choose a cache made for this attention: contiguous, or none."
            )
