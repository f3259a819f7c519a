"""A cache cut into blocks of tokens: each sequence has a table of the blocks that hold it, in any order.

What this buys: blocks are taken as a sequence grows, so little is set aside in vain; sequences with a common
beginning refer to the same blocks; a block that two refer to is copied when one of them writes into it.
How a block's numbers are stored is up to the subclasses.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.kernels import ops
from labkit.kvcache.allocator import BlockAllocator
from labkit.kvcache.base import KVCache
from labkit.kvcache.online import OnlineAttention
from labkit.kvcache.parts import CacheFull, LayerEntries, Segment
from labkit.kvcache.prefixes import Prefixes
from labkit.kvcache.reader import SHORT_TOKENS, StepRows, make_reader
from labkit.kvcache.usage import Usage

PIECE_TOKENS = 512
"""Stored tokens that a long step (a chunk of a prompt) reads at once."""


class BlockCache(KVCache):
    """The tables and the bookkeeping. ``table`` (n_sequences, max_blocks) int32 is what kernels read."""

    in_place_tokens = SHORT_TOKENS

    def __init__(
        self,
        layers: Sequence[LayerEntries],
        *,
        block_size: int,
        max_blocks: int,
        n_blocks: int = 0,
        sharing: bool = False,
        **sizes: Any,
    ) -> None:
        super().__init__(layers, **sizes)
        self.block_size = block_size
        self.n_blocks = n_blocks or max_blocks * self.n_sequences
        self.allocator = BlockAllocator(self.n_blocks)
        self.table = torch.zeros((self.n_sequences, max_blocks), dtype=torch.int32, device=self.device)
        self._blocks: dict[int, list[int]] = {}
        self._rows: dict[int, int] = {}
        self._prefixes = Prefixes(self.allocator, block_size) if sharing else None
        self._fresh: tuple[Tensor, Tensor] | None = None
        self.reader: Any = None  # PyTorch reads, piece by piece

    def read_by_kernel(self) -> None:
        if self.reader is None:
            self.reader = make_reader(self)

    # --- what a subclass stores -----------------------------------------------------------------------

    @abstractmethod
    def n_blocked(self, sequence_id: int) -> int:
        """Committed tokens of a sequence that lie in blocks."""

    @abstractmethod
    def n_blocked_after(self, segment: Segment) -> int:
        """The same once the open step is committed."""

    @abstractmethod
    def n_readable(self, segment: Segment) -> int:
        """Tokens of a sequence that are found in blocks while the step is open; later ones lie elsewhere."""

    @abstractmethod
    def pieces(self, layer_idx: int, segment: Segment) -> Iterator[tuple[Tensor, Tensor]]:
        """K and V of the tokens before the step, (G, S, D) each, oldest first, a bounded number at a time."""

    @abstractmethod
    def copy_block(self, source: int, target: int) -> None:
        """Copy what one block holds, in every layer."""

    # --- one step -------------------------------------------------------------------------------------

    def _reserve(self) -> None:
        needed = sum(self._n_to_allocate(segment) for segment in self.segments)
        if needed > self.allocator.n_free:
            raise CacheFull(
                f"the {self.kind} cache has {self.allocator.n_free} of its {self.n_blocks} blocks of "
                f"{self.block_size} tokens free and this step needs {needed}: free() a sequence, or build the cache "
                "with more blocks (n_blocks)."
            )
        for segment in self.segments:
            self._open(segment.sequence_id)
            blocks = self._blocks[segment.sequence_id]
            if self._writes_into_last(segment):
                self._own(segment.sequence_id, self.n_blocked(segment.sequence_id) // self.block_size)
            first = len(blocks)
            while len(blocks) * self.block_size < self.n_blocked_after(segment):
                blocks.append(self.allocator.allocate())
            self._show(segment.sequence_id, first)
        self._step = StepRows(self)

    def _n_to_allocate(self, segment: Segment) -> int:
        blocks = self._blocks.get(segment.sequence_id, [])
        n = max(0, -(-self.n_blocked_after(segment) // self.block_size) - len(blocks))
        if self._writes_into_last(segment):
            n += self.allocator.references(blocks[segment.n_past // self.block_size]) > 1
        return n

    def _writes_into_last(self, segment: Segment) -> bool:
        """Whether the step fills up a block that already holds tokens."""
        n_blocked = self.n_blocked(segment.sequence_id)
        return bool(n_blocked % self.block_size) and self.n_blocked_after(segment) > n_blocked

    def _own(self, sequence_id: int, idx: int) -> None:
        """Make block ``idx`` of a sequence its own and unpublished, so that it can be written: copy on write."""
        blocks = self._blocks[sequence_id]
        if self.allocator.references(blocks[idx]) > 1:
            shared, blocks[idx] = blocks[idx], self.allocator.allocate()
            self.copy_block(shared, blocks[idx])
            self.allocator.release(shared)
            self._show(sequence_id, idx)
        else:
            self.allocator.forget(blocks[idx])

    def _open(self, sequence_id: int) -> None:
        if sequence_id not in self._rows:
            taken = set(self._rows.values())
            self._rows[sequence_id] = next(row for row in range(self.n_sequences) if row not in taken)
            self._blocks[sequence_id] = []

    def _show(self, sequence_id: int, first: int) -> None:
        """Write the table's entries from ``first`` on."""
        blocks = self._blocks[sequence_id][first:]
        if blocks:
            row = self.table[self._rows[sequence_id]]
            row[first : first + len(blocks)] = torch.tensor(blocks, dtype=torch.int32, device=self.device)

    def _abandon(self) -> None:
        for segment in self.segments:
            if segment.sequence_id in self._lengths:
                self._trim(segment.sequence_id, self.n_blocked(segment.sequence_id))
        super()._abandon()
        self._fresh = None

    def _trim(self, sequence_id: int, n_blocked: int) -> None:
        blocks = self._blocks[sequence_id]
        while len(blocks) * self.block_size >= n_blocked + self.block_size:
            self.allocator.release(blocks.pop())

    def attend(self, layer_idx: int, q: Tensor, *, scale: float, softcap: float | None = None) -> Tensor:
        step = self._step
        if self.reader is None or not step.short:
            return torch.cat([self._attend_one(layer_idx, s, q[s.rows], scale, softcap) for s in self.segments])
        rows = step.of(self.layers[layer_idx].window)
        if not step.long:
            return self.reader.attend(layer_idx, q, rows, scale, softcap)
        short = self.reader.attend(layer_idx, q[step.short_rows], rows, scale, softcap)
        out = short.new_empty((len(q), *short.shape[1:]))
        out[step.short_rows] = short
        for segment in step.long:
            out[segment.rows] = self._attend_one(layer_idx, segment, q[segment.rows], scale, softcap)
        return out

    def _attend_one(self, layer_idx: int, segment: Segment, q: Tensor, scale: float, softcap: float | None) -> Tensor:
        """The new tokens of one sequence see those before them as stored, and each other as they were given."""
        layer = self.layers[layer_idx]
        assert self._fresh is not None, "append() comes before attend()"
        k, v = (fresh[segment.rows].transpose(0, 1) for fresh in self._fresh)  # (G, T, D)
        sight = {"window": layer.window, "n_sinks": layer.n_sinks}
        if not segment.n_past:
            return ops.attend(q, k, v, n_past=0, scale=scale, softcap=softcap, **sight)
        positions = torch.arange(segment.n_total, device=q.device)
        ours = positions[segment.n_past :]
        online = OnlineAttention(q, k.shape[0], scale=scale, softcap=softcap)
        first = 0
        for k_past, v_past in self.pieces(layer_idx, segment):
            theirs = positions[first : first + k_past.shape[1]]
            mask = None if layer.window is None else ops.visible(ours, theirs, **sight)
            if mask is None or mask.any():
                online.add(k_past, v_past, mask)
            first += k_past.shape[1]
        online.add(k, v, None if len(ours) == 1 else ops.visible(ours, ours, **sight))
        return online.result()

    def commit(self) -> None:
        segments = self.segments
        super().commit()
        self._fresh = None
        if self._prefixes:
            for s in segments:
                self._prefixes.publish(s.sequence_id, self._blocks[s.sequence_id], self.n_blocked(s.sequence_id))

    # --- between steps --------------------------------------------------------------------------------

    def adopt(self, token_ids: Sequence[int], sequence_id: int = 0) -> int:
        self._claim()
        self._check_new(sequence_id)
        if not self._prefixes:
            return 0
        blocks = self._prefixes.adopt(sequence_id, token_ids)
        self._open(sequence_id)
        self._blocks[sequence_id] = blocks
        self._lengths[sequence_id] = len(blocks) * self.block_size
        self._show(sequence_id, 0)
        return self._lengths[sequence_id]

    def note(self, token_ids: Sequence[int], sequence_id: int = 0) -> None:
        if self._prefixes:
            self._prefixes.note(sequence_id, token_ids)

    def _check_new(self, sequence_id: int) -> None:
        if sequence_id in self._lengths:
            raise ValueError(
                f"sequence {sequence_id} already has {self.n_tokens(sequence_id)} tokens: free() it first, or use "
                "another id."
            )
        if len(self._lengths) >= self.n_sequences:
            raise CacheFull(f"the {self.kind} cache holds {self.n_sequences} sequences, all in use: free() one first.")

    def fork(self, source: int, target: int) -> None:
        self._claim()
        if source not in self._lengths:
            raise ValueError(f"sequence {source} cannot be forked: it has no tokens.")
        self._check_new(target)
        self._open(target)
        for block in self._blocks[source]:
            self.allocator.share(block)
        self._blocks[target] = list(self._blocks[source])
        self._lengths[target] = self._lengths[source]
        if self._prefixes:
            self._prefixes.fork(source, target)
        self._show(target, 0)

    def truncate(self, n_tokens: int, sequence_id: int = 0) -> None:
        super().truncate(n_tokens, sequence_id)
        if sequence_id in self._blocks:
            self._trim(sequence_id, min(n_tokens, self.n_blocked(sequence_id)))
            if self._prefixes:
                self._prefixes.truncate(sequence_id, n_tokens)

    def free(self, sequence_id: int = 0) -> None:
        super().free(sequence_id)
        for block in reversed(self._blocks.pop(sequence_id, [])):
            self.allocator.release(block)
        self._rows.pop(sequence_id, None)
        if self._prefixes:
            self._prefixes.free(sequence_id)

    def block_ids(self, sequence_id: int = 0) -> tuple[int, ...]:
        """The blocks that hold a sequence, in its order: for looking at."""
        return tuple(self._blocks.get(sequence_id, ()))

    def usage(self) -> Usage:
        a_block, a_token, outside = self._sizes()
        tokens_in: dict[int, int] = {}
        references, n_outside = 0, 0
        for sequence_id, blocks in list(self._blocks.items()):
            n_blocked = min(self.n_blocked(sequence_id), self.n_tokens(sequence_id))
            n_outside += self.n_tokens(sequence_id) - n_blocked
            for idx, block in enumerate(blocks):
                held = min(self.block_size, max(0, n_blocked - idx * self.block_size))
                tokens_in[block] = max(held, tokens_in.get(block, 0))
                references += 1
        return Usage(
            nbytes=self.nbytes,
            n_tokens=sum(self._lengths.values()),
            reserved_bytes=len(tokens_in) * a_block + len(self._blocks) * outside,
            held_bytes=sum(tokens_in.values()) * a_block // self.block_size + n_outside * a_token,
            shared_bytes=(references - len(tokens_in)) * a_block,
        )

    # --- for kernels ----------------------------------------------------------------------------------

    def slot_of(self, sequence_id: int) -> int:
        return self._rows[sequence_id]

    def step_rows(self, window: int | None) -> Any:
        """What the open step's tokens see, for layers with this window: (T, 4) int64 (``reader.Rows``)."""
        return self._step.of(window).array

    @abstractmethod
    def stored(self, layer_idx: int) -> dict[str, Tensor]:
        """The tensors of one layer, by name."""

    @abstractmethod
    def kernel_sizes(self, layer_idx: int) -> dict[str, Any]:
        """What ``kernels.cpu.stored.why_not`` asks."""

    @abstractmethod
    def spec(self, layer_idx: int) -> dict[str, int]:
        """What ``kernels.cpu.stored.make_spec`` asks."""

    @abstractmethod
    def _sizes(self) -> tuple[int, int, int]:
        """Bytes of one block, of one token outside blocks, and set aside outside blocks for a sequence; all layers."""
