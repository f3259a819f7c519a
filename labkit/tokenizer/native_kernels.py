"""The compiled encoder: cut, look up, merge, text by text. Importing this module needs numba.

All arrays are flat and typed; the only state is a word cache, one for each thread. A cache is ``(slots, where, hashes,
bytes, ids, used)``: an open-addressing table of entry numbers, and for each entry its place in the pools of word bytes
and of token ids.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numba import njit

from labkit.tokenizer.merge_table import MergeTable
from labkit.tokenizer.native_merge import merge_long, merge_short
from labkit.tokenizer.native_split import word_end

MAX_CACHED_BYTES = 48
_SCAN_LIMIT = 40  # symbols; longer words are merged through a queue
_CACHE_ENTRIES = 1 << 17
_options: dict[str, Any] = {"nogil": True, "cache": True}


@njit(**_options)
def _hash(data, start, stop):
    h = np.uint64(stop - start)
    for i in range(start, stop):
        h = (h ^ np.uint64(data[i])) * np.uint64(0x100000001B3)
    return h ^ (h >> np.uint64(29))


@njit(**_options)
def _remember(cache, slot, h, data, start, stop, ids, n):
    slots, where, hashes, pool, id_pool, used = cache
    entry, byte_at, id_at = used[0], used[1], used[2]
    if entry >= len(hashes) or byte_at + stop - start > len(pool) or id_at + n > len(id_pool):
        return
    for i in range(stop - start):
        pool[byte_at + i] = data[start + i]
    for i in range(n):
        id_pool[id_at + i] = ids[i]
    where[entry, 0], where[entry, 1], where[entry, 2], where[entry, 3] = byte_at, stop - start, id_at, n
    hashes[entry] = h
    slots[slot] = entry
    used[0], used[1], used[2] = entry + 1, byte_at + stop - start, id_at + n


@njit(**_options)
def _look_up(cache, h, data, start, stop):
    """(slot, entry): entry is -1 when the word is not in the cache, and slot where it belongs."""
    slots, where, hashes, pool, _, _ = cache
    mask = len(slots) - 1
    slot = np.int64(h & np.uint64(mask))
    length = stop - start
    while slots[slot] >= 0:
        entry = slots[slot]
        if hashes[entry] == h and where[entry, 1] == length:
            at = where[entry, 0]
            same = True
            for i in range(length):
                if pool[at + i] != data[start + i]:
                    same = False
                    break
            if same:
                return slot, np.int64(entry)
        slot = (slot + 1) & mask
    return slot, np.int64(-1)


@njit(**_options)
def _seed(cache, data, ends, ids):
    start = 0
    for w in range(len(ends)):
        h = _hash(data, start, ends[w])
        slot, entry = _look_up(cache, h, data, start, ends[w])
        if entry < 0:
            _remember(cache, slot, h, data, start, ends[w], ids[w : w + 1], 1)
        start = ends[w]


@njit(**_options)
def _encode(data, ends, first, last, classes, rule, keys, ranks, joined, byte_ids, cache, out, out_ends):
    """Encode texts `first` to `last`; ids go to `out`, the index behind each text (-1: redo in Python) to
    `out_ends`."""
    _, where, _, _, id_pool, _ = cache
    scratch = np.empty(64, np.int32)
    at = np.empty(64, np.int64)
    n_out = 0
    for t in range(first, last):
        i = np.int64(0) if t == 0 else ends[t - 1]
        end = ends[t]
        begin = n_out
        complete = True
        while i < end:
            j = word_end(data, i, end, classes, rule)
            h = _hash(data, i, j)
            slot, entry = _look_up(cache, h, data, i, j)
            if entry >= 0:
                id_at = where[entry, 2]
                for k in range(where[entry, 3]):
                    out[n_out + k] = id_pool[id_at + k]
                n_out += where[entry, 3]
            else:
                n = j - i
                if n > len(scratch):
                    scratch = np.empty(n, np.int32)
                for k in range(n):
                    scratch[k] = byte_ids[data[i + k]]
                    complete = complete and scratch[k] >= 0
                if not complete:
                    break
                if n <= _SCAN_LIMIT:
                    n = merge_short(scratch, n, at, keys, ranks, joined)
                else:
                    n = merge_long(scratch, n, keys, ranks, joined)
                for k in range(n):
                    out[n_out + k] = scratch[k]
                n_out += n
                if j - i <= MAX_CACHED_BYTES:
                    _remember(cache, slot, h, data, i, j, scratch, n)
            i = j
        if complete:
            out_ends[t - first] = n_out
        else:
            n_out = begin
            out_ends[t - first] = -1
    return n_out


def new_cache(known: tuple[Any, Any, Any] | None) -> tuple[Any, ...]:
    """An empty word cache, or one that knows every word of the vocabulary."""
    n_known = 0 if known is None else len(known[1])
    entries = _CACHE_ENTRIES + n_known
    n_slots = 1 << (2 * entries).bit_length()
    pool = entries * 10 + (0 if known is None else len(known[0]))
    cache = (
        np.full(n_slots, -1, np.int32), np.zeros((entries, 4), np.int64), np.zeros(entries, np.uint64),
        np.zeros(pool, np.uint8), np.zeros(entries * 4, np.int32), np.zeros(3, np.int64),
    )  # fmt: skip
    if known is not None:
        _seed(cache, *known)
    return cache


def encode_texts(data: Any, ends: Any, first: int, last: int, classes: Any, rule: Any, table: Any, cache: Any) -> Any:
    """(ids, index behind each text) of the texts `first` to `last` of the joined `data`."""
    n_bytes = int(ends[last - 1]) - (int(ends[first - 1]) if first else 0)
    out = np.empty(max(1, n_bytes), np.int32)  # a token is at least one byte; pages that stay unused cost nothing
    out_ends = np.empty(last - first, np.int64)
    n = _encode(
        data, ends, first, last, classes, rule, table.keys, table.ranks, table.joined, table.byte_ids, cache, out,
        out_ends,
    )  # fmt: skip
    return out[:n], out_ends


def balanced_runs(ends: Any, n_workers: int) -> list[tuple[int, int]]:
    """Consecutive ranges of texts of about equal bytes, one for each worker."""
    total = int(ends[-1])
    cuts = [int(np.searchsorted(ends, total * w // n_workers, "left")) for w in range(1, n_workers)]
    edges = sorted({0, *(cut + 1 for cut in cuts if cut + 1 < len(ends)), len(ends)})
    return list(pairwise(edges))


def compile_now() -> None:
    """Compile every kernel by running them once on a tiny vocabulary."""
    data = np.frombuffer(b"ab  ab's " + b"ab" * 40, np.uint8)
    ends = np.array([3, len(data)], np.int64)
    classes = np.zeros(128, np.uint8)
    classes.flags.writeable = False
    keys = np.full(16, -1, np.int64)
    empty = np.zeros(16, np.int32)

    table = MergeTable(keys, empty, empty, np.arange(256, dtype=np.int32), 1)
    known = (np.frombuffer(b"ab", np.uint8), np.array([2], np.int64), np.array([7], np.int32))
    encode_texts(data, ends, 0, 2, classes, np.array([0, 0, 0, 0], np.int64), table, new_cache(known))
