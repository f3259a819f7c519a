"""No cache: every step computes the keys and values of the whole sequence again.

What a decode step costs without a memory: the work of a prefill, growing with each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.kvcache.base import KVCache
from labkit.kvcache.parts import LayerEntries, Segment, rows_of
from labkit.registry import register


class NoCache(KVCache):
    kind = "none"
    keeps_history = False
    pairs_only = False

    def __init__(self, layers: Sequence[LayerEntries], **sizes: Any) -> None:
        super().__init__(layers, **sizes)
        self._layer_idx = -1
        self._now: dict[str, Tensor] = {}

    def append(self, layer_idx: int, **entries: Tensor) -> None:
        if layer_idx != self._layer_idx:
            self._layer_idx, self._now = layer_idx, {}  # the layer before has been computed
        self._now |= entries

    def dense(self, layer_idx: int, segment: Segment) -> tuple[Tensor, Tensor, Tensor | None]:
        k, v = (self._now[name][segment.rows].transpose(0, 1) for name in ("k", "v"))
        return k, v, None

    def rows(self, layer_idx: int, name: str, segment: Segment) -> tuple[Tensor, int]:
        entry = next(entry for entry in self.layers[layer_idx].entries if entry.name == name)
        if name not in self._now or layer_idx != self._layer_idx:  # no block has closed yet
            return torch.empty(0, *entry.shape, dtype=entry.dtype or self.dtype, device=self.device), 0
        return self._now[name][rows_of(segment, self.segments, entry.rate)], 0

    def commit(self) -> None:
        self._layer_idx, self._now = -1, {}
        self.segments = ()
        self._stepping = None

    @property
    def nbytes(self) -> int:
        return 0

    @classmethod
    def predict_nbytes(
        cls,
        layers: Sequence[LayerEntries],
        *,
        capacity_tokens: int,
        n_sequences: int = 1,
        dtype: torch.dtype = torch.float32,
        config: Any = None,
    ) -> int:
        return 0


@register("kv_cache", "none", summary="Nothing is kept: each step recomputes the whole sequence")
def build(config: None, layers: Sequence[LayerEntries], **sizes: Any) -> NoCache:
    return NoCache(layers, **sizes)
