"""The compiled merge loops: the rule of :mod:`labkit.tokenizer.merging` on ids. Importing this module needs numba.

`keys`, `ranks`, `joined` are the hash table of :class:`labkit.tokenizer.merge_table.MergeTable`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

_options: dict[str, Any] = {"nogil": True, "cache": True}


@njit(inline="always", **_options)
def _find(left, right, keys):
    """The slot of a pair in the merge table, or -1."""
    n_slots = len(keys)
    key = np.int64(left) << 32 | np.int64(right)
    slot = ((key * np.int64(-7046029254386353131)) >> 20) & (n_slots - 1)
    while keys[slot] != key:
        if keys[slot] == -1:
            return np.int64(-1)
        slot = (slot + 1) & (n_slots - 1)
    return slot


@njit(**_options)
def merge_short(ids, n, at, keys, ranks, joined):
    """Merge the first `n` of `ids` in place by repeated search for the lowest rank; returns how many are left."""
    for i in range(n - 1):
        at[i] = _find(ids[i], ids[i + 1], keys)  # slot of the pair (i, i + 1)
    while n > 1:
        best, lowest = -1, np.int64(1) << 40
        for i in range(n - 1):
            if at[i] >= 0 and ranks[at[i]] < lowest:
                best, lowest = i, np.int64(ranks[at[i]])
        if best < 0:
            break
        ids[best] = joined[at[best]]
        for i in range(best + 1, n - 1):
            ids[i] = ids[i + 1]
        for i in range(best, n - 2):
            at[i] = at[i + 1]
        n -= 1
        if best + 1 < n:
            at[best] = _find(ids[best], ids[best + 1], keys)
        if best > 0:
            at[best - 1] = _find(ids[best - 1], ids[best], keys)
    return n


@njit(**_options)
def _sift_up(heap, i):
    entry = heap[i]
    while i > 0 and heap[(i - 1) >> 1] > entry:
        heap[i] = heap[(i - 1) >> 1]
        i = (i - 1) >> 1
    heap[i] = entry


@njit(**_options)
def _sift_down(heap, i, n):
    entry = heap[i]
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= entry:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = entry


@njit(**_options)
def merge_long(ids, n, keys, ranks, joined):
    """Merge the first `n` of `ids` in place through a queue over a linked list, O(n log n); returns how many are
    left."""
    after = np.arange(1, n + 1).astype(np.int32)
    before = np.arange(-1, n - 1).astype(np.int32)
    alive = np.ones(n, np.bool_)
    heap = np.empty(
        n, np.int64
    )  # rank << 32 | position; each join frees two entries' worth of pairs and adds at most two
    size = 0
    for i in range(n - 1):
        slot = _find(ids[i], ids[i + 1], keys)
        if slot >= 0:
            heap[size] = np.int64(ranks[slot]) << 32 | i
            size += 1
    for i in range(size // 2 - 1, -1, -1):
        _sift_down(heap, i, size)
    while size > 0:
        entry = heap[0]
        size -= 1
        heap[0] = heap[size]
        if size > 1:
            _sift_down(heap, 0, size)
        i = entry & 0xFFFFFFFF
        if not alive[i] or after[i] >= n:
            continue
        j = after[i]
        slot = _find(ids[i], ids[j], keys)
        if slot < 0 or np.int64(ranks[slot]) != entry >> 32:
            continue
        ids[i] = joined[slot]
        alive[j] = False
        k = after[j]
        after[i] = k
        if size + 2 > len(heap):
            grown = np.empty(2 * len(heap) + 2, np.int64)
            grown[:size] = heap[:size]
            heap = grown
        if k < n:
            before[k] = i
            slot = _find(ids[i], ids[k], keys)
            if slot >= 0:
                heap[size] = np.int64(ranks[slot]) << 32 | i
                _sift_up(heap, size)
                size += 1
        h = before[i]
        if h >= 0:
            slot = _find(ids[h], ids[i], keys)
            if slot >= 0:
                heap[size] = np.int64(ranks[slot]) << 32 | h
                _sift_up(heap, size)
                size += 1
    left = 0
    for i in range(n):
        if alive[i]:
            ids[left] = ids[i]
            left += 1
    return left
