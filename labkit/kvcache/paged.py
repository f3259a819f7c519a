"""Blocks of full-precision keys and values behind a block table (PagedAttention, arXiv 2309.06180)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.kvcache.base import KVCache
from labkit.kvcache.blocks import PIECE_TOKENS, BlockCache
from labkit.kvcache.parts import LayerEntries, Segment
from labkit.registry import option, register


@dataclass(frozen=True)
class Paged:
    """Blocks behind a block table. ``dtype`` other than "model" stores the blocks quantised, as ``int8`` and ``int4``
    do: one block is then one group of the keys' grids."""

    block_size: int = option(16, choices=(8, 16, 32, 64), help="tokens per block")
    dtype: str = option("model", choices=("model", "int8", "int4"), help="how a block's numbers are stored")
    n_blocks: int = option(
        0, low=0, high=1 << 20, help="blocks in the pool; 0: enough for every sequence at its longest"
    )
    prefix_sharing: bool = option(True, choices=(True, False), help="find blocks with the same content and share them")


class PagedCache(BlockCache):
    """``store[layer][name]`` is (G, n_blocks, block_size, D); position p lies in block ``table[p // block_size]``."""

    kind = "paged"
    in_place_tokens = 1 << 30

    def __init__(self, layers: Sequence[LayerEntries], *, config: Paged | None = None, **sizes: Any) -> None:
        config = config or Paged()
        max_blocks = -(-sizes["capacity_tokens"] // config.block_size)
        super().__init__(
            layers,
            block_size=config.block_size,
            max_blocks=max_blocks,
            n_blocks=config.n_blocks,
            sharing=config.prefix_sharing,
            **sizes,
        )
        self.store = [
            {
                entry.name: torch.zeros(
                    (entry.shape[0], self.n_blocks, self.block_size, entry.shape[1]),
                    device=self.device,
                    dtype=self.dtype,
                )
                for entry in layer.entries
            }
            for layer in self.layers
        ]
        self._flat = [{name: t.flatten(1, 2) for name, t in layer.items()} for layer in self.store]  # (G, slots, D)

    def n_blocked(self, sequence_id: int) -> int:
        return self.n_tokens(sequence_id)

    def n_blocked_after(self, segment: Segment) -> int:
        return segment.n_total

    def n_readable(self, segment: Segment) -> int:
        # The step's own tokens are written before they are read.
        return segment.n_total

    def _reserve(self) -> None:
        super()._reserve()
        slots = [
            self._blocks[s.sequence_id][p // self.block_size] * self.block_size + p % self.block_size
            for s in self.segments
            for p in range(s.n_past, s.n_total)
        ]
        self._slots: Any = slots[0] if len(slots) == 1 else torch.tensor(slots, device=self.device)

    def append(self, layer_idx: int, **entries: Tensor) -> None:
        self._fresh = entries["k"], entries["v"]
        for name, new in entries.items():
            flat = self._flat[layer_idx][name]
            if isinstance(self._slots, int):
                flat[:, self._slots] = new[0]
            else:
                flat.index_copy_(1, self._slots, new.transpose(0, 1).to(self.dtype))

    def pieces(self, layer_idx: int, segment: Segment) -> Iterator[tuple[Tensor, Tensor]]:
        table = self.table[self._rows[segment.sequence_id]]
        store = self.store[layer_idx]
        step = PIECE_TOKENS // self.block_size
        for first in range(0, -(-segment.n_past // self.block_size), step):
            n = min(step * self.block_size, segment.n_past - first * self.block_size)
            blocks = table[first : first + -(-n // self.block_size)]
            k, v = (store[name][:, blocks].flatten(1, 2)[:, :n] for name in ("k", "v"))
            yield k, v

    def dense(self, layer_idx: int, segment: Segment) -> tuple[Tensor, Tensor, Tensor | None]:
        n_blocks = -(-segment.n_total // self.block_size)
        blocks = self.table[self._rows[segment.sequence_id], :n_blocks]
        k, v = (self.store[layer_idx][name][:, blocks].flatten(1, 2)[:, : segment.n_total] for name in ("k", "v"))
        return k, v, None

    def copy_block(self, source: int, target: int) -> None:
        for layer in self.store:
            for tensor in layer.values():
                tensor[:, target] = tensor[:, source]

    # --- for kernels ----------------------------------------------------------------------------------

    def stored(self, layer_idx: int) -> dict[str, Tensor]:
        return self.store[layer_idx]

    def kernel_sizes(self, layer_idx: int) -> dict[str, Any]:
        k, v = self.store[layer_idx]["k"], self.store[layer_idx]["v"]
        kind = {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(self.dtype, str(self.dtype).removeprefix("torch."))
        return {"kind": kind, "block": self.block_size, "dims_k": k.shape[-1], "dims_v": v.shape[-1]}

    def spec(self, layer_idx: int) -> dict[str, int]:
        from labkit.kernels.cpu.stored_spec import KINDS

        fields: dict[str, Any] = self.kernel_sizes(layer_idx) | {"n_groups": self.store[layer_idx]["k"].shape[0]}
        fields["kind"] = KINDS[str(fields["kind"])]
        for name, tensor in self.store[layer_idx].items():
            group, block, row, _ = (stride * tensor.itemsize for stride in tensor.stride())
            fields |= {name: tensor.data_ptr(), f"{name}_group": group, f"{name}_block": block, f"{name}_row": row}
        return fields

    # --- bytes ----------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + sum(tensor.nbytes for layer in self.store for tensor in layer.values())

    def _sizes(self) -> tuple[int, int, int]:
        values = sum(entry.n_values for layer in self.layers for entry in layer.entries)
        return values * self.block_size * self.dtype.itemsize, values * self.dtype.itemsize, 0

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
        config = config or Paged()
        if config.dtype != "model":
            from labkit.kvcache.quantized_kinds import PagedQuantizedCache

            return PagedQuantizedCache.predict_nbytes(
                layers, capacity_tokens=capacity_tokens, n_sequences=n_sequences, dtype=dtype, config=config
            )
        max_blocks = -(-capacity_tokens // config.block_size)
        n_blocks = config.n_blocks or n_sequences * max_blocks
        values = sum(entry.n_values for layer in layers for entry in layer.entries)
        return values * n_blocks * config.block_size * dtype.itemsize + 4 * n_sequences * max_blocks


@register("kv_cache", "paged", config=Paged, summary="Blocks of tokens behind a block table: taken as needed, shared")
def build(config: Paged, layers: Sequence[LayerEntries], **sizes: Any) -> KVCache:
    if config.dtype != "model":
        from labkit.kvcache.quantized_kinds import PagedQuantizedCache

        return PagedQuantizedCache(layers, config=config, **sizes)
    return PagedCache(layers, config=config, **sizes)
