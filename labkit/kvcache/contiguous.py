"""One block of memory for each entry of a layer, sized for the longest sequence before the first token.

Appending writes one row in place and attention reads a view: nothing is copied. The price is that the
whole capacity is taken from the start, used or not.

Any entries fit. One that is shared by several tokens has so many rows less; one with a window is a ring of the rows
that are still read, and its new rows are written when the step is committed, so that none is lost to a step that was
interrupted. Rolling back inside a block is then nothing special: its tokens' rows are still in their ring, and the
row that they had become is not read until it has been written again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.kvcache.base import KVCache
from labkit.kvcache.parts import ROLLBACK_TOKENS, CacheFull, Entry, LayerEntries, Segment, rows_of
from labkit.registry import register


class ContiguousCache(KVCache):
    """``store[layer][name]`` is (n_sequences, G, capacity, D) for a key and a value: a head's keys lie side by side;
    (n_sequences, rows, *shape) for other entries."""

    kind = "contiguous"
    in_place_tokens = 1 << 30
    pairs_only = False

    def __init__(self, layers: Sequence[LayerEntries], **sizes: Any) -> None:
        super().__init__(layers, **sizes)
        self.store = [
            {entry.name: self._room(entry, layer.is_pair) for entry in layer.entries} for layer in self.layers
        ]
        self._entries = [{entry.name: entry for entry in layer.entries} for layer in self.layers]
        self._pairs = [layer.is_pair for layer in self.layers]
        self._has_rings = any(n < self.capacity_tokens for n in self._ring_rows())
        self._fresh: dict[tuple[int, str], Tensor] = {}
        self._written: dict[int, int] = {}
        self._slots: dict[int, int] = {}

    def _room(self, entry: Entry, is_pair: bool) -> Tensor:
        shape: tuple[int, ...] = entry.n_rows(self.capacity_tokens), *entry.shape
        if is_pair:
            shape = entry.shape[0], self.capacity_tokens, *entry.shape[1:]
        return torch.zeros((self.n_sequences, *shape), device=self.device, dtype=entry.dtype or self.dtype)

    def _ring_rows(self) -> Iterator[int]:
        for layer, store in zip(self.layers, self.store, strict=True):
            yield from (store[entry.name].shape[1] for entry in layer.entries if entry.window is not None)

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
            store, entry = self.store[layer_idx][name], self._entries[layer_idx][name]
            if entry.window is not None:
                self._fresh[layer_idx, name] = new.to(store.dtype)
                continue
            for s in self.segments:
                if self._pairs[layer_idx]:
                    store[self._slots[s.sequence_id], :, s.n_past : s.n_total] = new[s.rows].transpose(0, 1)
                else:
                    at = s.closed(entry.rate)
                    store[self._slots[s.sequence_id], at.start : at.stop] = new[rows_of(s, self.segments, entry.rate)]

    def rows(self, layer_idx: int, name: str, segment: Segment) -> tuple[Tensor, int]:
        entry, store = self._entries[layer_idx][name], self.store[layer_idx][name][self._slots[segment.sequence_id]]
        if entry.window is None:
            return store[: segment.n_total // entry.rate], 0
        new = self._fresh[layer_idx, name][segment.rows]
        first = max(0, segment.n_past + 1 - entry.window)
        if first >= segment.n_past:
            return new, segment.n_past
        past = torch.arange(first, segment.n_past, device=self.device) % len(store)
        return torch.cat((store.index_select(0, past), new)), first

    def commit(self) -> None:
        for (layer_idx, name), new in self._fresh.items():
            store = self.store[layer_idx][name]
            for s in self.segments:
                n_kept = min(s.n_new, store.shape[1])
                at = torch.arange(s.n_total - n_kept, s.n_total, device=self.device) % store.shape[1]
                store[self._slots[s.sequence_id], at] = new[s.rows][s.n_new - n_kept :]
        for s in self.segments:
            self._written[s.sequence_id] = max(s.n_total, self._written.get(s.sequence_id, 0))
        self._fresh = {}
        super().commit()

    def _abandon(self) -> None:
        self._fresh = {}
        super()._abandon()

    def truncate(self, n_tokens: int, sequence_id: int = 0) -> None:
        lowest = self._written.get(sequence_id, 0) - ROLLBACK_TOKENS
        if self._has_rings and 0 < n_tokens < lowest:
            raise ValueError(
                f"cannot truncate sequence {sequence_id} to {n_tokens} tokens: this attention's window has let go of "
                f"tokens that the next one would see. It can go back {ROLLBACK_TOKENS} tokens, to {lowest}; or free() "
                "the sequence and compute it again."
            )
        super().truncate(n_tokens, sequence_id)
        if n_tokens == 0:
            self._written.pop(sequence_id, None)

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
        self._written[target] = self._written.get(source, n)
        for is_pair, layer in zip(self._pairs, self.store, strict=True):
            for tensor in layer.values():
                upto = (slice(None), slice(n)) if is_pair else (slice(n),)
                tensor[(self._slots[target], *upto)] = tensor[(self._slots[source], *upto)]

    def free(self, sequence_id: int = 0) -> None:
        super().free(sequence_id)
        self._slots.pop(sequence_id, None)
        self._written.pop(sequence_id, None)

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
        return n_sequences * sum(entry.nbytes(capacity_tokens, dtype) for layer in layers for entry in layer.entries)


@register("kv_cache", "contiguous", summary="One preallocated block a layer: fast, and taken whether used or not")
def build(config: None, layers: Sequence[LayerEntries], **sizes: Any) -> ContiguousCache:
    return ContiguousCache(layers, **sizes)
