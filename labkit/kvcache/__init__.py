"""How keys and values are stored. Importing this room registers every kind."""

from labkit.kvcache import none, contiguous, paged, quantized_kinds, sliding, offloaded  # noqa: I001 - the order of menus
from labkit.kvcache.base import KVCache
from labkit.kvcache.parts import CacheFull, Entry, LayerEntries, Segment
from labkit.kvcache.forms import Int4, Int8
from labkit.kvcache.offloaded import Offloaded
from labkit.kvcache.paged import Paged
from labkit.kvcache.sliding import Sliding
from labkit.kvcache.usage import Usage

__all__ = [
    "CacheFull",
    "Entry",
    "Int4",
    "Int8",
    "KVCache",
    "LayerEntries",
    "Offloaded",
    "Paged",
    "Segment",
    "Sliding",
    "Usage",
    "contiguous",
    "none",
    "offloaded",
    "paged",
    "quantized_kinds",
    "sliding",
]
