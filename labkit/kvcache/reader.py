"""Which kernel reads a stored cache here, and what a step tells it.

A reader answers ``attend`` for steps of few tokens a sequence (decoding, checking a draft), where the stored bytes
are what costs. Where no kernel is at hand the caches read their storage piece by piece in PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np

    from labkit.kvcache.blocks import BlockCache

SHORT_TOKENS = 8
"""New tokens of one sequence up to which a kernel that reads the cache once for each is the faster way."""


class Rows(NamedTuple):
    """For each new token: its table row, first visible position, end, tokens that lie in blocks. (T, 4)."""

    array: np.ndarray
    n_visible: int
    """Stored tokens that are read in all."""


class StepRows:
    """The open step's short segments, as a kernel wants them: one ``Rows`` for each window among the layers."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self.short = [segment for segment in cache.segments if segment.n_new <= SHORT_TOKENS]
        self.long = [segment for segment in cache.segments if segment.n_new > SHORT_TOKENS]
        self.short_rows = [row for s in self.short for row in range(s.row, s.row + s.n_new)] if self.long else []
        self._rows: dict[int | None, Rows] = {}

    def of(self, window: int | None) -> Rows:
        if window not in self._rows:
            import numpy as np

            cache, rows = self._cache, []
            for segment in self.short:
                row = cache._rows[segment.sequence_id]
                blocked = cache.n_readable(segment)
                for last in range(segment.n_past + 1, segment.n_total + 1):
                    rows.append((row, 0 if window is None else max(0, last - window), last, min(blocked, last)))
            array = np.array(rows, dtype=np.int64)
            self._rows[window] = Rows(array, int((array[:, 2] - array[:, 1]).sum()))
        return self._rows[window]


class TritonReader:
    """``labkit.kernels.triton.stored`` over a cache's tensors."""

    def __init__(self, cache: BlockCache, kernel: Any) -> None:
        self.cache, self.kernel = cache, kernel

    def attend(self, layer_idx: int, q: Tensor, rows: Rows, scale: float, softcap: float | None) -> Tensor:
        return self.kernel.attend(
            self.cache.stored(layer_idx),
            self.cache.table,
            torch.from_numpy(rows.array).to(q.device, torch.int32, non_blocking=True),
            q,
            longest=int((rows.array[:, 2] - rows.array[:, 1]).max()),
            scale=scale,
            n_sinks=self.cache.layers[layer_idx].n_sinks,
            softcap=softcap,
        )


def make_reader(cache: BlockCache) -> TritonReader | None:
    """The reader for a cache's storage on its device, or None: PyTorch then reads, piece by piece."""
    if cache.device.type != "cuda":
        return None
    try:
        from labkit.kernels.triton import stored
    except ImportError:  # Triton is not installed here
        return None
    return TritonReader(cache, stored)
