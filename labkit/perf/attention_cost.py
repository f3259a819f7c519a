"""What attention costs beside its weights, for each kind: scores and their use, entries read and written.

Counted is a multiplication and an addition for each pair of a query and a key that it may see: grouped attention 4 D a
head and pair; latent attention in its absorbed form, 2 (L + R) for the score and 2 L for the mix; a chosen row as any
other; an indexer 2 D^I a head and pair, over *every* row that it chooses from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from labkit.kvcache import Entry, LayerEntries
from labkit.model.attention import entries_of
from labkit.model.config import CompressedAttention, GroupedAttention, LatentAttention, as_dtype
from labkit.perf import formats


@dataclass(frozen=True)
class Work:
    """For one sequence."""

    core_flops: float
    """Queries meet keys, and their weights meet values."""
    index_flops: float
    """Choosing the keys."""
    read_bytes: float
    write_bytes: float


def attention_work(
    attention: Any, *, n_new: int, n_past: int, dtype: str, kv_cache: Any = "contiguous", full_square: bool = False
) -> Work:
    """The work of ``n_new`` tokens after ``n_past``. ``full_square``: the masked half of grouped attention too."""
    work = _KINDS[type(attention)](attention, n_new, n_past, dtype, kv_cache, full_square)
    kept = formats.cache_class(kv_cache)[0].keeps_history
    return work if kept else Work(work.core_flops, work.index_flops, 0.0, 0.0)


def _grouped(
    attention: GroupedAttention, n_new: int, n_past: int, dtype: str, kv_cache: Any, full_square: bool
) -> Work:
    sight = formats.sight(attention, kv_cache=kv_cache)
    n_pairs = (square if full_square else seen)(sight, n_new, n_past)
    a_token = formats.layer_token_nbytes(attention, dtype=dtype, kv_cache=kv_cache)
    flops = 4.0 * attention.n_heads * attention.d_head * n_pairs
    return Work(flops, 0.0, a_token * reach(sight, n_new, n_past), a_token * n_new)


def _latent(attention: LatentAttention, n_new: int, n_past: int, dtype: str, kv_cache: Any, full_square: bool) -> Work:
    width = 2 * attention.d_latent + attention.d_rope
    indexer = attention.indexer
    n_pairs = rows_seen(n_past + n_new, 1, indexer and indexer.top_k) - rows_seen(n_past, 1, indexer and indexer.top_k)
    index_flops = 0.0
    if indexer is not None:
        index_flops = 2.0 * indexer.n_heads * indexer.d_head * (rows_seen(n_past + n_new, 1) - rows_seen(n_past, 1))
    return _work(attention, 2.0 * attention.n_heads * width * n_pairs, index_flops, n_new, n_past, dtype)


def _compressed(
    attention: CompressedAttention, n_new: int, n_past: int, dtype: str, kv_cache: Any, full_square: bool
) -> Work:
    def pairs(rate: int, cap: int | None) -> int:
        return rows_seen(n_past + n_new, rate, cap) - rows_seen(n_past, rate, cap)

    indexer, n_pairs, index_flops = attention.indexer, pairs(1, attention.window), 0.0
    if attention.rate:
        n_pairs += pairs(attention.rate, indexer and indexer.top_k)
    if indexer is not None:
        index_flops = 2.0 * indexer.n_heads * indexer.d_head * pairs(attention.rate, None)
    flops = 4.0 * attention.n_heads * attention.d_head * n_pairs
    return _work(attention, flops, index_flops, n_new, n_past, dtype)


_KINDS: dict[type, Any] = {
    GroupedAttention: _grouped,
    LatentAttention: _latent,
    CompressedAttention: _compressed,
}


def _work(attention: Any, core: float, index: float, n_new: int, n_past: int, dtype: str) -> Work:
    """The bytes of a layer's entries: rows that some new token reads, rows that come to be."""
    entries, n_total = entries_of(attention).entries, n_past + n_new
    top_k = attention.indexer.top_k if attention.indexer else None
    n_read = n_written = 0.0
    for entry in entries:
        a_row = row_nbytes(entry, dtype)
        n_written += a_row * (n_total // entry.rate - n_past // entry.rate)
        if entry.d_value is None and entry.window is not None:  # an open block: read once, when it closes
            n_read += a_row * n_new
        elif entry.window is not None:
            n_read += a_row * min(n_total, n_new + entry.window - 1)
        elif entry.d_value is not None and top_k is not None:
            n_read += a_row * min(n_total // entry.rate, n_new * top_k)
        else:
            n_read += a_row * (n_total // entry.rate)
    return Work(core, index, n_read, n_written)


def row_nbytes(entry: Entry, dtype: str) -> int:
    """Bytes of one row in a cache of ``dtype``."""
    return entry.n_values * (entry.dtype or as_dtype(dtype)).itemsize


# --- who sees how many ------------------------------------------------------------------------------------


def rows_seen(n: int, rate: int, cap: int | None = None) -> int:
    """(query, row) pairs of the first n positions: the sum over t <= n of min(t // rate, cap).

    >>> rows_seen(10, 4), sum(t // 4 for t in range(1, 11)), rows_seen(10, 4, 1)
    (10, 10, 7)
    """
    upto = n if cap is None else min(n, (cap + 1) * rate - 1)
    k = upto // rate
    return rate * k * (k - 1) // 2 + k * (upto - k * rate + 1) + (n - upto) * (cap or 0)


def seen(sight: LayerEntries, n_new: int, n_past: int) -> int:
    """(query, key) pairs that a causal step needs, window and sinks respected."""
    window, n_sinks = sight.window, sight.n_sinks
    return _seen_before(n_past + n_new, window, n_sinks) - _seen_before(n_past, window, n_sinks)


@lru_cache(maxsize=4096)
def _seen_before(n: int, window: int | None, n_sinks: int) -> int:
    """Pairs of the first n positions: the sum over p < n of min(p + 1, window) + min(sinks, p + 1 - window)."""
    if window is None:
        return n * (n + 1) // 2
    near = min(n, window)
    total = near * (near + 1) // 2 + (n - near) * window
    far = max(0, n - window)
    rising = min(far, n_sinks)
    return total + rising * (rising + 1) // 2 + (far - rising) * n_sinks


def square(sight: LayerEntries, n_new: int, n_past: int) -> int:
    """Pairs that the plain formulation multiplies: every new token with every key that any of them may see."""
    return n_new * reach(sight, n_new, n_past, any_sinks=False)


def reach(sight: LayerEntries, n_new: int, n_past: int, *, any_sinks: bool = True) -> int:
    """Keys that at least one of the new tokens sees. The plain path cuts a window only when there are no sinks."""
    window, n_sinks = sight.window, sight.n_sinks
    n_total = n_past + n_new
    if window is None or n_past < window:
        return n_total
    if n_sinks and not any_sinks:
        return n_total
    return min(n_total, n_new + window - 1 + n_sinks)
