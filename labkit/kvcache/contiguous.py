"""One block of memory a layer, sized for the longest sequence before the first token.

Appending writes one row in place and attention reads a view: nothing is copied. The price is that the
whole capacity is taken from the start, used or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.kvcache.base import KVCache
from labkit.kvcache.parts import CacheFull, LayerEntries, Segment
from labkit.registry import register


class ContiguousCache(KVCache):
    """``store[layer][name]`` is (n_sequences, G, capacity, D): a head's keys lie side by side."""

    kind = "contiguous"
    in_place_tokens = 1 << 30

    def __init__(self, layers: Sequence[LayerEntries], **sizes: Any) -> None:
        super().__init__(layers, **sizes)
        self.store = [
            {
                entry.name: torch.zeros(
                    (self.n_sequences, entry.shape[0], self.capacity_tokens, *entry.shape[1:]),
                    device=self.device,
                    dtype=self.dtype,
                )
                for entry in layer.entries
            }
            for layer in self.layers
        ]
        self._slots: dict[int, int] = {}

    def _reserve(self) -> None:
        for segment in self.segments:
            if segment.sequence_id not in self._slots:
                taken = set(self._slots.values())
                self._slots[segment.sequence_id] = next(i for i in range(self.n_sequences) if i not in taken)

    def slot_of(self, sequence_id: int) -> int:
        return self._slots[sequence_id]

    def rows_at(self, layer_idx: int) -> dict[str, int]:
        k, v = self.store[layer_idx]["k"], self.store[layer_idx]["v"]
        slot_stride, head_stride = k.stride(0) * k.itemsize, k.stride(1) * k.itemsize
        at = {"k": k.data_ptr(), "v": v.data_ptr(), "slot_stride": slot_stride, "head_stride": head_stride}
        return at | {"ring": 0, "ring_sinks": 0}

    def append(self, layer_idx: int, **entries: Tensor) -> None:
        for name, new in entries.items():
            store = self.store[layer_idx][name]
            for s in self.segments:
                store[self._slots[s.sequence_id], :, s.n_past : s.n_total] = new[s.rows].transpose(0, 1)

    def dense(self, layer_idx: int, segment: Segment) -> tuple[Tensor, Tensor, Tensor | None]:
        slot = self._slots[segment.sequence_id]
        store = self.store[layer_idx]
        return store["k"][slot, :, : segment.n_total], store["v"][slot, :, : segment.n_total], None

    def fork(self, source: int, target: int) -> None:
        self._claim()
        if source not in self._lengths or target in self._lengths:
            have = ", ".join(map(str, self._lengths)) or "none"
            raise ValueError(f"cannot fork sequence {source} into {target}: the sequences in use are {have}.")
        if len(self._lengths) >= self.n_sequences:
            raise CacheFull(f"the contiguous cache holds {self.n_sequences} sequences, all in use: free() one first.")
        taken = set(self._slots.values())
        self._slots[target] = next(i for i in range(self.n_sequences) if i not in taken)
        n = self._lengths[target] = self._lengths[source]
        for layer in self.store:
            for tensor in layer.values():
                tensor[self._slots[target], :, :n] = tensor[self._slots[source], :, :n]

    def free(self, sequence_id: int = 0) -> None:
        super().free(sequence_id)
        self._slots.pop(sequence_id, None)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self.store for tensor in layer.values())

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
        values = sum(entry.n_values for layer in layers for entry in layer.entries)
        return values * capacity_tokens * n_sequences * dtype.itemsize


@register("kv_cache", "contiguous", summary="One preallocated block a layer: fast, and taken whether used or not")
def build(config: None, layers: Sequence[LayerEntries], **sizes: Any) -> ContiguousCache:
    return ContiguousCache(layers, **sizes)
