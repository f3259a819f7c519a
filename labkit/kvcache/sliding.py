"""The first tokens and the latest ones, nothing between: memory that stops growing (StreamingLLM, arXiv 2309.17453).

The first tokens ("sinks") take up attention that has nowhere else to go: without them, a model that was trained to
see everything falls apart as soon as they are evicted. A layer that looks back over a window of its own keeps just
that window, and loses nothing.

Keys keep the positions they were written at, so this bounds the memory and not the positions: the model's context
stays its limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.kernels import ops
from labkit.kvcache.base import KVCache
from labkit.kvcache.parts import ROLLBACK_TOKENS, LayerEntries, Segment
from labkit.kvcache.usage import Usage
from labkit.registry import option, register


@dataclass(frozen=True)
class Sliding:
    """A window of latest tokens and the sinks. ``window=0``: only layers with a window of their own forget."""

    window: int = option(1024, low=0, high=1 << 20, step=16, help="latest tokens that stay visible; 0: the layers' own")
    n_sinks: int = option(4, low=0, high=64, step=1, help="first tokens that always stay")

    def layer(self, layer: LayerEntries) -> LayerEntries:
        """What is left of a layer's sight."""
        if not self.window or (layer.window is not None and layer.window <= self.window):
            return layer
        return replace(layer, window=self.window, n_sinks=max(self.n_sinks, layer.n_sinks))


@dataclass(frozen=True)
class _Room:
    """Rows of one layer's store: the sinks, then a ring of ``ring`` (position p at n_sinks + p mod ring)."""

    n_sinks: int
    ring: int

    @classmethod
    def of(cls, layer: LayerEntries, capacity_tokens: int) -> _Room:
        if layer.window is None or layer.n_sinks + layer.window + ROLLBACK_TOKENS >= capacity_tokens:
            return cls(0, capacity_tokens)
        return cls(layer.n_sinks, layer.window + ROLLBACK_TOKENS)

    @property
    def n_rows(self) -> int:
        return self.n_sinks + self.ring

    def slot(self, position: int) -> int:
        """The row where a position lies, as long as it is kept."""
        return position if position < self.n_sinks else self.n_sinks + (position - self.n_sinks) % self.ring

    def kept(self, segment: Segment) -> list[int]:
        """Which of a segment's new tokens are still there when all of them are written."""
        first = max(0, segment.n_new - self.ring)
        n_sinks = max(0, min(first, self.n_sinks - segment.n_past))
        return [*range(n_sinks), *range(first, segment.n_new)]

    def positions(self, n_tokens: int, device: torch.device) -> Tensor | None:
        """The position that each row holds after ``n_tokens``; None while row p holds position p."""
        if n_tokens <= self.n_rows:
            return None
        last = n_tokens - 1
        ring = last - (last - self.n_sinks - torch.arange(self.ring, device=device)) % self.ring
        return torch.cat((torch.arange(self.n_sinks, device=device), ring))


def _is_short(segment: Segment) -> bool:
    return segment.n_new <= ROLLBACK_TOKENS


def _one_query(
    q: Tensor, k: Tensor, v: Tensor, k_positions: Tensor | None, position: int, sight: LayerEntries, scale: float
) -> Tensor:
    """One token (H, D) over all rows that are left: the heads that share a KV head become the rows of one product."""
    mask = None
    if sight.window is not None and position >= sight.window:
        if k_positions is None:
            k_positions = torch.arange(k.shape[1], device=k.device)
        at = torch.tensor([position], device=k.device)
        mask = ops.visible(at, k_positions, window=sight.window, n_sinks=sight.n_sinks)
    grouped = q.unflatten(0, (k.shape[0], -1))[None]  # (1, G, H/G, D)
    out = F.scaled_dot_product_attention(grouped, k[None], v[None], attn_mask=mask, scale=scale)
    return out.flatten(1, 2)


class SlidingCache(KVCache):
    """``store[layer][name]`` is (n_sequences, G, n_sinks + ring, D)."""

    kind = "sliding"
    in_place_tokens = ROLLBACK_TOKENS
    rollback_tokens = ROLLBACK_TOKENS - 1  # beside the one that stays

    def __init__(self, layers: Sequence[LayerEntries], *, config: Sliding | None = None, **sizes: Any) -> None:
        config = config or Sliding()
        super().__init__(layers, **sizes)
        self.sights = [config.layer(layer) for layer in self.layers]
        self.lossless = all(  # type: ignore[misc]
            sight == layer or (sight.window or 0) >= self.capacity_tokens
            for sight, layer in zip(self.sights, self.layers, strict=True)
        )
        self._rooms = [_Room.of(sight, self.capacity_tokens) for sight in self.sights]
        self.store = [
            {
                entry.name: torch.zeros(
                    (self.n_sequences, entry.shape[0], room.n_rows, entry.shape[1]),
                    device=self.device,
                    dtype=self.dtype,
                )
                for entry in layer.entries
            }
            for layer, room in zip(self.layers, self._rooms, strict=True)
        ]
        self._slots: dict[int, int] = {}
        self._written: dict[int, int] = {}
        self._pending: list[tuple[int, Segment, list[int], Tensor, Tensor]] = []
        self._positions: dict[tuple[_Room, int], Tensor | None] = {}
        self._fresh: tuple[Tensor, Tensor] | None = None

    def _reserve(self) -> None:
        self._positions = {}
        for segment in self.segments:
            if segment.sequence_id not in self._slots:
                taken = set(self._slots.values())
                self._slots[segment.sequence_id] = next(i for i in range(self.n_sequences) if i not in taken)

    # --- one step -------------------------------------------------------------------------------------

    def append(self, layer_idx: int, **entries: Tensor) -> None:
        """A short step overwrites only what no query can see any more, even after a rollback. A long one attends
        first and is written at the commit, so that an interrupted one has changed nothing."""
        k, v = self._fresh = entries["k"], entries["v"]
        for s in self.segments:
            kept = self._rooms[layer_idx].kept(s)
            if _is_short(s):
                self._write(layer_idx, s, kept, k[s.rows], v[s.rows])
            else:
                self._pending.append((layer_idx, s, kept, k[s.rows][kept], v[s.rows][kept]))

    def _write(self, layer_idx: int, s: Segment, kept: list[int], k: Tensor, v: Tensor) -> None:
        slots = [self._rooms[layer_idx].slot(s.n_past + i) for i in kept]
        for name, new in (("k", k), ("v", v)):
            store = self.store[layer_idx][name][self._slots[s.sequence_id]]
            if len(slots) == 1:
                store[:, slots[0]] = new[0]
            else:
                store.index_copy_(1, torch.tensor(slots, device=self.device), new.transpose(0, 1).to(self.dtype))

    def attend(self, layer_idx: int, q: Tensor, *, scale: float, softcap: float | None = None) -> Tensor:
        sight = self.sights[layer_idx]
        outs = []
        for s in self.segments:
            k, v, k_positions = self.dense(layer_idx, s) if _is_short(s) else self._joined(layer_idx, s)
            if s.n_new == 1 and softcap is None:
                outs.append(_one_query(q[s.row], k, v, k_positions, s.n_past, sight, scale))
                continue
            outs.append(
                ops.attend(
                    q[s.rows],
                    k,
                    v,
                    n_past=s.n_past,
                    k_positions=k_positions,
                    scale=scale,
                    window=sight.window,
                    n_sinks=sight.n_sinks,
                    softcap=softcap,
                )
            )
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def dense(self, layer_idx: int, segment: Segment) -> tuple[Tensor, Tensor, Tensor | None]:
        """What is left of a sequence, in the order of its rows: a view."""
        room, store, slot = self._rooms[layer_idx], self.store[layer_idx], self._slots[segment.sequence_id]
        n = min(segment.n_total, room.n_rows)
        key = room, segment.n_total
        if key not in self._positions:
            self._positions[key] = room.positions(segment.n_total, self.device)
        return store["k"][slot, :, :n], store["v"][slot, :, :n], self._positions[key]

    def sight(self, layer_idx: int) -> LayerEntries:
        return self.sights[layer_idx]

    def slot_of(self, sequence_id: int) -> int:
        return self._slots[sequence_id]

    def rows_at(self, layer_idx: int) -> dict[str, int]:
        k, v, room = self.store[layer_idx]["k"], self.store[layer_idx]["v"], self._rooms[layer_idx]
        slot_stride, head_stride = k.stride(0) * k.itemsize, k.stride(1) * k.itemsize
        at = {"k": k.data_ptr(), "v": v.data_ptr(), "slot_stride": slot_stride, "head_stride": head_stride}
        return at | {"ring": room.ring, "ring_sinks": room.n_sinks}

    def _joined(self, layer_idx: int, s: Segment) -> tuple[Tensor, Tensor, Tensor | None]:
        """What is left of the past, then a long step's own tokens, which are not in the store yet."""
        assert self._fresh is not None, "append() comes before attend()"
        k, v = (fresh[s.rows].transpose(0, 1) for fresh in self._fresh)
        if not s.n_past:
            return k, v, None
        k_past, v_past, positions = self.dense(layer_idx, Segment(s.sequence_id, 0, 0, s.n_past))
        if positions is None:
            positions = torch.arange(s.n_past, device=self.device)
        ours = torch.arange(s.n_past, s.n_total, device=self.device)
        return torch.cat((k_past, k), dim=1), torch.cat((v_past, v), dim=1), torch.cat((positions, ours))

    def commit(self) -> None:
        for layer_idx, s, kept, k, v in self._pending:
            self._write(layer_idx, s, kept, k, v)
        for s in self.segments:
            self._written[s.sequence_id] = max(s.n_total, self._written.get(s.sequence_id, 0))
        self._pending, self._fresh = [], None
        super().commit()

    def _abandon(self) -> None:
        self._pending, self._fresh = [], None
        super()._abandon()

    # --- between steps --------------------------------------------------------------------------------

    def truncate(self, n_tokens: int, sequence_id: int = 0) -> None:
        written = self._written.get(sequence_id, 0)
        lowest = written - ROLLBACK_TOKENS
        if 0 < n_tokens < lowest and any(written > room.n_rows for room in self._rooms):
            raise ValueError(
                f"cannot truncate sequence {sequence_id} to {n_tokens} tokens: the sliding cache has evicted tokens "
                f"that the next one would see. It can go back {ROLLBACK_TOKENS} tokens, to {lowest}; or free() the "
                "sequence and compute it again."
            )
        super().truncate(n_tokens, sequence_id)
        if n_tokens == 0:
            self._written.pop(sequence_id, None)

    def free(self, sequence_id: int = 0) -> None:
        super().free(sequence_id)
        self._slots.pop(sequence_id, None)
        self._written.pop(sequence_id, None)

    def usage(self) -> Usage:
        rows = {room: sum(min(n, room.n_rows) for n in self._lengths.values()) for room in set(self._rooms)}
        values = [sum(entry.n_values for entry in layer.entries) * self.dtype.itemsize for layer in self.layers]
        held = sum(rows[room] * a_row for room, a_row in zip(self._rooms, values, strict=True))
        reserved = self.nbytes // self.n_sequences * len(self._lengths)
        return Usage(self.nbytes, sum(self._lengths.values()), reserved, held)

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
        config = config or Sliding()
        rows = [_Room.of(config.layer(layer), capacity_tokens).n_rows for layer in layers]
        values = [sum(entry.n_values for entry in layer.entries) for layer in layers]
        return sum(map(int.__mul__, rows, values)) * n_sequences * dtype.itemsize


@register(
    "kv_cache", "sliding", config=Sliding, summary="The first tokens and a window of the latest; the rest is gone"
)
def build(config: Sliding, layers: Sequence[LayerEntries], **sizes: Any) -> SlidingCache:
    return SlidingCache(layers, config=config, **sizes)
