"""What a cache's bytes are used for at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """Bytes by purpose: ``held_bytes <= reserved_bytes <= nbytes``.

    The PagedAttention paper (arXiv 2309.06180) found 20 to 38 % of the reserved bytes holding tokens in systems that
    reserve for the longest answer, and more than 96 % with blocks.
    """

    nbytes: int
    """Allocated, exactly."""
    n_tokens: int
    """Tokens of all sequences; one that is shared counts for each."""
    reserved_bytes: int
    """Set aside for a sequence, so that no other can use them."""
    held_bytes: int
    """Filled with a token's entries; a token that is shared counts once."""
    shared_bytes: int = 0
    """Saved by sharing: what the sequences would hold on top, had each a copy of its own."""

    @property
    def free_bytes(self) -> int:
        """Allocated and not set aside: room for another sequence."""
        return self.nbytes - self.reserved_bytes

    @property
    def waste(self) -> float:
        """Share of the reserved bytes that hold nothing, 0 to 1 (fragmentation inside a reservation)."""
        return 1 - self.held_bytes / self.reserved_bytes if self.reserved_bytes else 0.0
