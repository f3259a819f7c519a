"""The quantised caches one can choose: 8 bits, 4 bits, and either behind a shared pool of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.kvcache.base import KVCache
from labkit.kvcache.forms import Int4, Int8
from labkit.kvcache.parts import LayerEntries
from labkit.kvcache.quantized import QuantizedCache
from labkit.registry import register


class Int8Cache(QuantizedCache):
    kind = "int8"


class Int4Cache(QuantizedCache):
    kind = "int4"

    @classmethod
    def default_config(cls) -> Any:
        return Int4()


class PagedQuantizedCache(QuantizedCache):
    """What ``Paged(dtype="int8")`` builds: blocks shared by content, and a pool of any size."""

    def __init__(self, layers: Sequence[LayerEntries], *, config: Any, **sizes: Any) -> None:
        self.kind = "paged"  # type: ignore[misc]
        super().__init__(layers, config=config, **sizes)


@register(
    "kv_cache", "int8", config=Int8, summary="8 bits a number, keys per channel, values per token, recent in full"
)
def build_int8(config: Int8, layers: Sequence[LayerEntries], **sizes: Any) -> KVCache:
    return Int8Cache(layers, config=config, **sizes)


@register("kv_cache", "int4", config=Int4, summary="4 bits a number: a quarter of the bytes, and an error to look at")
def build_int4(config: Int4, layers: Sequence[LayerEntries], **sizes: Any) -> KVCache:
    return Int4Cache(layers, config=config, **sizes)
