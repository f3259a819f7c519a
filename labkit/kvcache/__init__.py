"""How keys and values are stored. Importing this room registers every kind."""

from labkit.kvcache import contiguous, none
from labkit.kvcache.base import Entry, KVCache, LayerEntries, Segment

__all__ = ["Entry", "KVCache", "LayerEntries", "Segment", "contiguous", "none"]
