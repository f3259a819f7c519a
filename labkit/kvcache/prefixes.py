"""Sequences that begin alike share the blocks of their beginning, found by content. No tensors here."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.kvcache.allocator import BlockAllocator, content_key


class Prefixes:
    """What each sequence's tokens are, as far as they are known, and the keys under which its full blocks are found."""

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self.allocator, self.block_size = allocator, block_size
        self._token_ids: dict[int, list[int]] = {}
        self._keys: dict[int, list[bytes]] = {}

    def adopt(self, sequence_id: int, token_ids: Sequence[int]) -> list[int]:
        """Blocks that hold the first tokens of ``token_ids`` already, now also referred to by this sequence.

        The last token is never among them: somebody must compute the logits after it."""
        ids, size = list(token_ids), self.block_size
        blocks: list[int] = []
        keys: list[bytes] = []
        for start in range(0, len(ids) - size, size):
            key = content_key(keys[-1] if keys else b"", ids[start : start + size])
            block = self.allocator.find(key)
            if block is None:
                break
            self.allocator.share(block)
            blocks.append(block)
            keys.append(key)
        self._token_ids[sequence_id], self._keys[sequence_id] = ids, keys
        return blocks

    def note(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """The sequence's next tokens will be these."""
        self._token_ids.setdefault(sequence_id, []).extend(token_ids)

    def publish(self, sequence_id: int, blocks: list[int], n_tokens: int) -> None:
        """Make the blocks that are full and whose tokens are known findable."""
        ids, keys = self._token_ids.get(sequence_id, []), self._keys.setdefault(sequence_id, [])
        for idx in range(len(keys), min(n_tokens, len(ids)) // self.block_size):
            start = idx * self.block_size
            keys.append(content_key(keys[-1] if keys else b"", ids[start : start + self.block_size]))
            self.allocator.publish(blocks[idx], keys[-1])

    def fork(self, source: int, target: int) -> None:
        self._token_ids[target] = list(self._token_ids.get(source, []))
        self._keys[target] = list(self._keys.get(source, []))

    def truncate(self, sequence_id: int, n_tokens: int) -> None:
        """Later tokens are unknown again: others may come."""
        del self._token_ids.get(sequence_id, [])[n_tokens:]
        del self._keys.get(sequence_id, [])[n_tokens // self.block_size :]

    def free(self, sequence_id: int) -> None:
        self._token_ids.pop(sequence_id, None)
        self._keys.pop(sequence_id, None)
