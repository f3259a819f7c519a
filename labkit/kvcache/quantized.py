"""Keys and values in 8 or 4 bits, the latest tokens in full precision (KIVI, arXiv 2402.02750).

Keys have one grid per channel over a group of tokens, so a group must be complete before it can be written: the
tokens that follow the last complete group wait in a ring of full-precision rows, together with the ``recent`` ones
before them, which count most. A group that leaves the ring becomes one block.

A step of many tokens (a prompt) attends to its own tokens as they are and stores them quantised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.kvcache.blocks import PIECE_TOKENS, BlockCache
from labkit.kvcache.forms import Form, Int8, block_nbytes
from labkit.kvcache.grid import dequantize_keys, dequantize_values, quantize_keys, quantize_values
from labkit.kvcache.parts import LayerEntries, Segment

ROUNDS_EARLY = (
    "the {} cache rounds a group of tokens when enough have followed it, and guesses count: it may round one some "
    "tokens earlier than without a drafter, so the text may differ where the rounding shows"
)
KEEPS_NONE = (
    "the {} cache keeps no latest tokens as they are (recent=0), so it cannot take a guess back: nothing is guessed"
)


class QuantizedCache(BlockCache):
    """Blocks of codes and grids (``stored`` says which), and a ring: position p of a sequence lies at p mod W."""

    lossless = False

    def __init__(self, layers: Sequence[LayerEntries], *, config: Any, **sizes: Any) -> None:
        self.form = form = Form.of(config)
        capacity = sizes["capacity_tokens"]
        super().__init__(
            layers,
            block_size=form.group,
            max_blocks=form.max_blocks(capacity),
            n_blocks=form.n_blocks,
            sharing=form.sharing,
            **sizes,
        )
        self.ring_tokens = form.ring_tokens(capacity)
        self.rollback_tokens = form.recent
        self.rollback_note = ROUNDS_EARLY.format(form.kind) if form.recent else KEEPS_NONE.format(form.kind)
        self.store = [self._allocate(layer) for layer in self.layers]
        self._n_blocked: dict[int, int] = {}
        self._tails: dict[int, list[tuple[int, Tensor, Tensor]]] = {}

    def _check_fit(self) -> None:
        super()._check_fit()
        for layer_idx, layer in enumerate(self.layers):
            widths = [entry.shape[1] for entry in layer.entries]
            if self.form.kind == "int4" and any(width % 2 for width in widths):
                raise ValueError(
                    f"layer {layer_idx} has heads of {widths} dims, and two int4 codes share a byte: use int8."
                )

    def _allocate(self, layer: LayerEntries) -> dict[str, Tensor]:
        (n_groups, d_k), (_, d_v) = (entry.shape for entry in layer.entries)
        n, size, half = self.n_blocks, self.block_size, 2 if self.form.kind == "int4" else 1
        codes = {"device": self.device, "dtype": torch.uint8 if self.form.kind == "int4" else torch.int8}
        grid = {"device": self.device, "dtype": torch.bfloat16}
        ring = {"device": self.device, "dtype": self.dtype}
        n_grids = self.form.n_grids(d_v)
        return {
            "k": torch.zeros((n_groups, n, d_k, size // half), **codes),
            "k_scale": torch.zeros((n_groups, n, d_k), **grid),
            "k_zero": torch.zeros((n_groups, n, d_k), **grid),
            "v": torch.zeros((n_groups, n, size, d_v // half), **codes),
            "v_scale": torch.zeros((n_groups, n, n_grids, size), **grid),
            "v_zero": torch.zeros((n_groups, n, n_grids, size), **grid),
            "recent_k": torch.zeros((self.n_sequences, n_groups, self.ring_tokens, d_k), **ring),
            "recent_v": torch.zeros((self.n_sequences, n_groups, self.ring_tokens, d_v), **ring),
        }

    # --- where tokens lie -----------------------------------------------------------------------------

    def n_blocked(self, sequence_id: int) -> int:
        return self._n_blocked.get(sequence_id, 0)

    def n_blocked_after(self, segment: Segment) -> int:
        blocked, form = self.n_blocked(segment.sequence_id), self.form
        if segment.n_total - blocked < form.recent + form.group:
            return blocked
        return max(blocked, (segment.n_total - form.recent) // form.group * form.group)

    def n_readable(self, segment: Segment) -> int:
        return self.n_blocked(segment.sequence_id)

    def _steps_into_ring(self, segment: Segment) -> bool:
        return segment.n_total - self.n_blocked(segment.sequence_id) <= self.ring_tokens

    def _slots(self, first: int, last: int) -> Tensor:
        return torch.arange(first, last, device=self.device) % self.ring_tokens

    # --- one step -------------------------------------------------------------------------------------

    def append(self, layer_idx: int, **entries: Tensor) -> None:
        k, v = entries["k"], entries["v"]
        self._fresh = k, v
        store = self.store[layer_idx]
        for s in self.segments:
            row = self._rows[s.sequence_id]
            if s.n_new == 1 and self._steps_into_ring(s):
                slot = s.n_past % self.ring_tokens
                store["recent_k"][row, :, slot] = k[s.row]
                store["recent_v"][row, :, slot] = v[s.row]
            elif self._steps_into_ring(s):
                slots = self._slots(s.n_past, s.n_total)
                store["recent_k"][row].index_copy_(1, slots, k[s.rows].transpose(0, 1).to(self.dtype))
                store["recent_v"][row].index_copy_(1, slots, v[s.rows].transpose(0, 1).to(self.dtype))
            else:
                self._append_long(layer_idx, s, k[s.rows].transpose(0, 1), v[s.rows].transpose(0, 1))

    def _append_long(self, layer_idx: int, s: Segment, k: Tensor, v: Tensor) -> None:
        """Quantise what will leave the ring, k and v (G, T, D). The ring itself waits for the commit, so that an
        interrupted step has changed nothing that counts."""
        blocked, after = self.n_blocked(s.sequence_id), self.n_blocked_after(s)
        k_old, v_old = self._ring(layer_idx, s.sequence_id, blocked, s.n_past)
        n = after - blocked
        self._store_groups(
            layer_idx,
            s.sequence_id,
            blocked,
            torch.cat((k_old, k), dim=1)[:, :n],
            torch.cat((v_old, v), dim=1)[:, :n],
        )
        first = max(after, s.n_past)
        tail = slice(first - s.n_past, None)
        self._tails.setdefault(s.sequence_id, []).append((layer_idx, k[:, tail].clone(), v[:, tail].clone()))

    def _ring(self, layer_idx: int, sequence_id: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Full-precision rows of positions first ... last-1: a copy, of a bounded number."""
        slots, row = self._slots(first, last), self._rows[sequence_id]
        return self.store[layer_idx]["recent_k"][row][:, slots], self.store[layer_idx]["recent_v"][row][:, slots]

    def _store_groups(self, layer_idx: int, sequence_id: int, first: int, k: Tensor, v: Tensor) -> None:
        """Quantise whole groups, k and v (G, S, D), into the blocks that hold positions from ``first`` on."""
        store, size = self.store[layer_idx], self.block_size
        begin = first // size
        blocks = torch.tensor(self._blocks[sequence_id][begin : begin + k.shape[1] // size], device=self.device)
        codes, scale, zero = quantize_keys(k, size, self.form.kind)
        store["k"][:, blocks], store["k_scale"][:, blocks], store["k_zero"][:, blocks] = codes, scale, zero
        codes, scale, zero = quantize_values(v, size, store["v_scale"].shape[2], self.form.kind)
        store["v"][:, blocks], store["v_scale"][:, blocks], store["v_zero"][:, blocks] = codes, scale, zero

    def commit(self) -> None:
        for s in self.segments:
            blocked, after = self.n_blocked(s.sequence_id), self.n_blocked_after(s)
            if tails := self._tails.get(s.sequence_id):
                slots, row = self._slots(max(after, s.n_past), s.n_total), self._rows[s.sequence_id]
                for layer_idx, k, v in tails:
                    self.store[layer_idx]["recent_k"][row].index_copy_(1, slots, k.to(self.dtype))
                    self.store[layer_idx]["recent_v"][row].index_copy_(1, slots, v.to(self.dtype))
            elif after > blocked:
                for layer_idx in range(len(self.layers)):
                    self._store_groups(
                        layer_idx, s.sequence_id, blocked, *self._ring(layer_idx, s.sequence_id, blocked, after)
                    )
            self._n_blocked[s.sequence_id] = after
        self._tails = {}
        super().commit()

    def _abandon(self) -> None:
        self._tails = {}
        super()._abandon()

    def pieces(self, layer_idx: int, segment: Segment) -> Iterator[tuple[Tensor, Tensor]]:
        blocked = self.n_blocked(segment.sequence_id)
        n_blocks, step = blocked // self.block_size, PIECE_TOKENS // self.block_size
        for first in range(0, n_blocks, step):
            ids = self._blocks[segment.sequence_id][first : min(n_blocks, first + step)]
            yield self._rebuilt(layer_idx, torch.tensor(ids, device=self.device))
        if segment.n_past > blocked:
            yield self._ring(layer_idx, segment.sequence_id, blocked, segment.n_past)

    def _rebuilt(self, layer_idx: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of some blocks, (G, n * block_size, D) float32."""
        store, kind = self.store[layer_idx], self.form.kind
        k = dequantize_keys(store["k"][:, blocks], store["k_scale"][:, blocks], store["k_zero"][:, blocks], kind)
        v = dequantize_values(store["v"][:, blocks], store["v_scale"][:, blocks], store["v_zero"][:, blocks], kind)
        return k, v

    def dense(self, layer_idx: int, segment: Segment) -> tuple[Tensor, Tensor, Tensor | None]:
        """A copy of what the cache holds, dequantised: for looking at."""
        whole = Segment(segment.sequence_id, segment.row, 0, segment.n_total)
        k, v = zip(*self.pieces(layer_idx, whole), strict=True)
        return torch.cat(k, dim=1).to(self.dtype), torch.cat(v, dim=1).to(self.dtype), None

    # --- between steps --------------------------------------------------------------------------------

    def copy_block(self, source: int, target: int) -> None:
        raise AssertionError("a quantised block is written once, whole: it is never copied")

    def adopt(self, token_ids: Sequence[int], sequence_id: int = 0) -> int:
        n = super().adopt(token_ids, sequence_id)
        if sequence_id in self._lengths:
            self._n_blocked[sequence_id] = n
        return n

    def fork(self, source: int, target: int) -> None:
        super().fork(source, target)
        self._n_blocked[target] = self.n_blocked(source)
        for store in self.store:
            for name in ("recent_k", "recent_v"):
                store[name][self._rows[target]] = store[name][self._rows[source]]

    def truncate(self, n_tokens: int, sequence_id: int = 0) -> None:
        """Rolling back into a block puts the rest of it back into the ring, as the codes have it."""
        self._claim()
        blocked = self.n_blocked(sequence_id)
        if 0 <= n_tokens < blocked:
            first = n_tokens // self.block_size * self.block_size
            block = torch.tensor([self._blocks[sequence_id][first // self.block_size]], device=self.device)
            slots, row = self._slots(first, n_tokens), self._rows[sequence_id]
            for layer_idx, store in enumerate(self.store):
                k, v = self._rebuilt(layer_idx, block)
                store["recent_k"][row].index_copy_(1, slots, k[:, : len(slots)].to(self.dtype))
                store["recent_v"][row].index_copy_(1, slots, v[:, : len(slots)].to(self.dtype))
            self._n_blocked[sequence_id] = first
        super().truncate(n_tokens, sequence_id)

    def free(self, sequence_id: int = 0) -> None:
        super().free(sequence_id)
        self._n_blocked.pop(sequence_id, None)

    # --- for kernels ----------------------------------------------------------------------------------

    def stored(self, layer_idx: int) -> dict[str, Tensor]:
        return self.store[layer_idx]

    def kernel_sizes(self, layer_idx: int) -> dict[str, Any]:
        store = self.store[layer_idx]
        return {
            "kind": self.form.kind,
            "block": self.block_size,
            "dims_k": store["recent_k"].shape[-1],
            "dims_v": store["recent_v"].shape[-1],
            "v_grids": store["v_scale"].shape[2],
        }

    def spec(self, layer_idx: int) -> dict[str, int]:
        from labkit.kernels.cpu.stored_spec import KINDS

        store = self.store[layer_idx]
        fields: dict[str, Any] = self.kernel_sizes(layer_idx) | {
            "n_groups": store["k"].shape[0],
            "recent_tokens": self.ring_tokens,
        }
        fields["kind"] = KINDS[str(fields["kind"])]
        fields["recent_kind"] = KINDS["fp32" if self.dtype == torch.float32 else "bf16"]
        for name, tensor in store.items():
            fields[name] = tensor.data_ptr()
            stride = [step * tensor.itemsize for step in tensor.stride()]
            names = ("seq", "group", "row") if name.startswith("recent") else ("group", "block", "row")
            n = 2 if name.endswith("scale") else 0 if name.endswith("zero") else 3
            fields |= {f"{name}_{axis}": size for axis, size in list(zip(names, stride, strict=False))[:n]}
        return fields

    # --- bytes ----------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + sum(tensor.nbytes for store in self.store for tensor in store.values())

    def _sizes(self) -> tuple[int, int, int]:
        values = sum(entry.n_values for layer in self.layers for entry in layer.entries)
        a_block = sum(block_nbytes(layer, self.form) for layer in self.layers)
        return a_block, values * self.dtype.itemsize, values * self.dtype.itemsize * self.ring_tokens

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
        form = Form.of(config or cls.default_config())
        max_blocks = form.max_blocks(capacity_tokens)
        n_blocks = form.n_blocks or n_sequences * max_blocks
        values = sum(entry.n_values for layer in layers for entry in layer.entries)
        ring = n_sequences * form.ring_tokens(capacity_tokens) * values * dtype.itemsize
        return n_blocks * sum(block_nbytes(layer, form) for layer in layers) + ring + 4 * n_sequences * max_blocks

    @classmethod
    def default_config(cls) -> Any:
        return Int8()
