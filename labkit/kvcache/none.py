"""No cache: every step computes the keys and values of the whole sequence again.

What a decode step costs without a memory: the work of a prefill, growing with each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.kvcache.base import KVCache
from labkit.kvcache.parts import LayerEntries, Segment
from labkit.registry import register


class NoCache(KVCache):
    kind = "none"
    keeps_history = False

    def __init__(self, layers: Sequence[LayerEntries], **sizes: Any) -> None:
        super().__init__(layers, **sizes)
        self._now: dict[str, Tensor] = {}

    def append(self, layer_idx: int, **entries: Tensor) -> None:
        self._now = entries

    def dense(self, layer_idx: int, segment: Segment) -> tuple[Tensor, Tensor, Tensor | None]:
        k, v = (self._now[name][segment.rows].transpose(0, 1) for name in ("k", "v"))
        return k, v, None

    def commit(self) -> None:
        self._now = {}
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
