"""Who owns which block: a free list, reference counts, and an index by content. No tensors here.

A block is a number. It is *used* while a sequence refers to it, and *free* otherwise. A free block may still be
*published*: its content can be found by key and taken back into use, until the block is needed for something else.

>>> allocator = BlockAllocator(2)
>>> first = allocator.allocate()
>>> allocator.publish(first, key=b"The capital of")
>>> allocator.release(first)
>>> allocator.n_free, allocator.find(b"The capital of") == first
(2, True)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from hashlib import blake2b


class OutOfBlocks(Exception):
    """Every block is in use."""


class BlockAllocator:
    """Hands out ``n_blocks`` numbers. Reuses the least recently released, published ones last."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._references = [0] * n_blocks
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(n_blocks))
        self._key_of: dict[int, Hashable] = {}
        self._block_of: dict[Hashable, int] = {}

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_used(self) -> int:
        return self.n_blocks - len(self._free)

    def references(self, block: int) -> int:
        """How many sequences refer to ``block``; 0 when it is free."""
        return self._references[block]

    def allocate(self) -> int:
        """A free block, referred to once; its former content is forgotten. Raises OutOfBlocks."""
        if not self._free:
            raise OutOfBlocks(f"all {self.n_blocks} blocks are in use.")
        block, _ = self._free.popitem(last=False)
        self.forget(block)
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to ``block``; a free block that is still published comes back into use."""
        if not self._references[block]:
            if block not in self._key_of:
                raise ValueError(f"block {block} is free and holds nothing to share: allocate() instead.")
            del self._free[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One reference less; at none the block is free, its content kept findable as long as possible."""
        if not self._references[block]:
            raise ValueError(f"block {block} is already free: it was released twice.")
        self._references[block] -= 1
        if not self._references[block]:
            self._free[block] = None
            if block not in self._key_of:
                self._free.move_to_end(block, last=False)

    def publish(self, block: int, key: Hashable) -> None:
        """Let ``find(key)`` answer ``block``. The first block published under a key keeps it."""
        if not self._references[block]:
            raise ValueError(f"block {block} is free: only a block in use can be published.")
        if key not in self._block_of:
            self.forget(block)
            self._key_of[block] = key
            self._block_of[key] = block

    def find(self, key: Hashable) -> int | None:
        """The block published under ``key``, in use or free; None when there is none."""
        return self._block_of.get(key)

    def forget(self, block: int) -> None:
        """Unpublish ``block``, because its content is about to change."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]


def content_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Names a block by its tokens and by all that come before it (``parent``: the key of the block before, b"" for
    the first): keys and values depend on both. 128 bits of BLAKE2b.

    >>> content_key(b"", [1, 2]) == content_key(b"", (1, 2)), content_key(b"x", [1, 2]) == content_key(b"", [1, 2])
    (True, False)
    """
    content = b"".join(token_id.to_bytes(8, "little", signed=True) for token_id in token_ids)
    return blake2b(parent + content, digest_size=16).digest()
