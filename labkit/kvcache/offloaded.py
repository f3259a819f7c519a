"""Keys and values in the host's memory, fetched layer by layer: for a GPU whose own memory is the limit.

While one layer computes, the next layer's rows travel on a stream of their own into one of two buffers on the
device. The link is slower than the device's memory by a factor of 30 to 80, and a decode step reads every stored row
once: this buys room with time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.kvcache.contiguous import ContiguousCache
from labkit.kvcache.parts import LayerEntries, Segment
from labkit.registry import option, register


@dataclass(frozen=True)
class Offloaded:
    """The contiguous layout in pinned host memory."""

    pinned: bool = option(True, choices=(True, False), help="page-locked host memory, which the device copies faster")


class OffloadedCache(ContiguousCache):
    """``store`` as in ``contiguous``, on the host; ``buffers``: two layers' worth on the device, used in turn."""

    kind = "offloaded"
    pairs_only = True

    def __init__(self, layers: Sequence[LayerEntries], *, config: Offloaded | None = None, **sizes: Any) -> None:
        self.compute_device = torch.device(sizes.pop("device", "cpu"))
        super().__init__(layers, device="cpu", **sizes)
        self.device = self.compute_device
        self._on_cuda = self.compute_device.type == "cuda"
        if self._on_cuda and (config or Offloaded()).pinned:
            self.store = [{name: t.pin_memory() for name, t in layer.items()} for layer in self.store]
        self.buffers = [
            {
                name: torch.zeros((self.n_sequences, *shape), device=self.compute_device, dtype=self.dtype)
                for name, shape in _largest(self.layers, self.capacity_tokens).items()
            }
            for _ in range(2)
        ]
        self._stream = torch.cuda.Stream(self.compute_device) if self._on_cuda else None
        self._arrived: dict[int, Any] = {}
        self._done: list[Any] = [None, None]

    def _reserve(self) -> None:
        super()._reserve()
        self._arrived = {}
        self._fetch(0)

    def _buffer(self, layer_idx: int, name: str, slot: int, n_tokens: int) -> Tensor:
        """(G, n_tokens, D) of the buffer that this layer uses."""
        n_groups, width = next(e.shape for e in self.layers[layer_idx].entries if e.name == name)
        return self.buffers[layer_idx % 2][name][slot, :n_groups, :n_tokens, :width]

    def _fetch(self, layer_idx: int) -> None:
        """Start bringing the committed rows of a layer to the device."""
        if layer_idx >= len(self.layers) or layer_idx in self._arrived:
            return
        if self._stream is None:
            self._copy_past(layer_idx)
            self._arrived[layer_idx] = None
            return
        with torch.cuda.stream(self._stream):
            if self._done[layer_idx % 2] is not None:
                self._stream.wait_event(self._done[layer_idx % 2])
            self._copy_past(layer_idx)
            self._arrived[layer_idx] = self._stream.record_event()

    def _copy_past(self, layer_idx: int) -> None:
        for s in self.segments:
            slot = self._slots[s.sequence_id]
            for name, store in self.store[layer_idx].items():
                for head, source in zip(self._buffer(layer_idx, name, slot, s.n_past), store[slot], strict=True):
                    head.copy_(source[: s.n_past], non_blocking=True)

    def append(self, layer_idx: int, **entries: Tensor) -> None:
        self._fetch(layer_idx)
        if self._stream is not None:
            torch.cuda.current_stream(self.compute_device).wait_event(self._arrived[layer_idx])
        for s in self.segments:
            slot = self._slots[s.sequence_id]
            for name, new in entries.items():
                rows = new[s.rows].transpose(0, 1).to(self.dtype)
                self._buffer(layer_idx, name, slot, s.n_total)[:, s.n_past :] = rows
                self.store[layer_idx][name][slot, :, s.n_past : s.n_total].copy_(rows, non_blocking=True)
        self._fetch(layer_idx + 1)

    def attend(self, layer_idx: int, q: Tensor, *, scale: float, softcap: float | None = None) -> Tensor:
        out = super().attend(layer_idx, q, scale=scale, softcap=softcap)
        if self._stream is not None:
            self._done[layer_idx % 2] = torch.cuda.current_stream(self.compute_device).record_event()
        return out

    def dense(self, layer_idx: int, segment: Segment) -> tuple[Tensor, Tensor, Tensor | None]:
        slot = self._slots[segment.sequence_id]
        k, v = (self._buffer(layer_idx, name, slot, segment.n_total) for name in ("k", "v"))
        return k, v, None

    def commit(self) -> None:
        super().commit()
        if self._stream is not None:
            # The next step reads on the other stream what this one writes to the host.
            self._stream.wait_stream(torch.cuda.current_stream(self.compute_device))

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.device_nbytes

    @property
    def device_nbytes(self) -> int:
        """What is left on the device: the two buffers."""
        return sum(tensor.nbytes for buffer in self.buffers for tensor in buffer.values())

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
        host = super().predict_nbytes(layers, capacity_tokens=capacity_tokens, n_sequences=n_sequences, dtype=dtype)
        values = sum(g * n * d for g, n, d in _largest(layers, capacity_tokens).values())
        return host + 2 * values * n_sequences * dtype.itemsize


def _largest(layers: Sequence[LayerEntries], capacity_tokens: int) -> dict[str, tuple[int, int, int]]:
    """(G, capacity, D) that holds any layer's keys, and its values."""
    shapes: dict[str, tuple[int, int, int]] = {}
    for layer in layers:
        for entry in layer.entries:
            g, _, d = shapes.get(entry.name, (0, 0, 0))
            shapes[entry.name] = max(g, entry.shape[0]), capacity_tokens, max(d, entry.shape[1])
    return shapes


def why_not() -> str | None:
    if torch.cuda.is_available():
        return None
    return "it moves keys and values out of a GPU's memory, and this machine has no CUDA device"


@register("kv_cache", "offloaded", config=Offloaded, why_not=why_not, summary="In host memory, fetched layer by layer")
def build(config: Offloaded, layers: Sequence[LayerEntries], **sizes: Any) -> OffloadedCache:
    return OffloadedCache(layers, config=config, **sizes)
