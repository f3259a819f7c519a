"""The choices of a quantised cache, and the bytes that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from labkit.kvcache.grid import BITS
from labkit.kvcache.parts import LayerEntries
from labkit.registry import option


@dataclass(frozen=True)
class Int8:
    """Keys and values in 8 bits."""

    group: int = option(32, choices=(16, 32, 64), help="tokens on one grid of a key channel, dims on one of a value")
    recent: int = option(32, choices=(0, 32, 64, 128), help="latest tokens kept in full precision, at least")


@dataclass(frozen=True)
class Int4:
    """Keys and values in 4 bits."""

    group: int = option(32, choices=(16, 32, 64), help="tokens on one grid of a key channel, dims on one of a value")
    recent: int = option(128, choices=(0, 32, 64, 128), help="latest tokens kept in full precision, at least")


@dataclass(frozen=True)
class Form:
    """What a config asks for, in one vocabulary."""

    kind: str
    group: int
    recent: int
    n_blocks: int = 0
    sharing: bool = False

    @classmethod
    def of(cls, config: Any) -> Form:
        if isinstance(config, (Int8, Int4)):
            return cls(type(config).__name__.lower(), config.group, config.recent)
        recent = (Int8() if config.dtype == "int8" else Int4()).recent
        return cls(config.dtype, config.block_size, recent, config.n_blocks, config.prefix_sharing)

    def ring_tokens(self, capacity_tokens: int) -> int:
        """Full-precision rows for a sequence: the recent ones, the group that fills up, and as much to step into."""
        return -(-min(capacity_tokens, self.recent + 2 * self.group) // 8) * 8

    def max_blocks(self, capacity_tokens: int) -> int:
        return max(0, capacity_tokens - self.recent) // self.group

    def n_grids(self, d_v: int) -> int:
        return d_v // math.gcd(d_v, self.group)


def block_nbytes(layer: LayerEntries, form: Form) -> int:
    """Codes of ``bits`` each, and 4 bytes (scale and zero) a grid."""
    (n_groups, d_k), (_, d_v) = (entry.shape for entry in layer.entries)
    codes = form.group * (d_k + d_v) * BITS[form.kind] // 8
    grids = d_k + form.group * form.n_grids(d_v)
    return n_groups * (codes + 4 * grids)
