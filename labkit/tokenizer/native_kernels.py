"""The numba kernels behind :mod:`labkit.tokenizer.native`: cut, look up, merge. Importing this module needs numba.

All arrays are flat and typed; the only state is a word cache, one for each thread. A cache is
``(slots, where, hashes, bytes, ids, used)``: an open-addressing table of entry numbers, and for each entry its place in the pools
of word bytes and of token ids.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from labkit.tokenizer.rules import BLANK, LETTER, NEWLINE, NUMBER, OTHER

MAX_CACHED_BYTES = 48
_SCAN_LIMIT = 40  # symbols; longer words are merged through a queue
_CACHE_ENTRIES = 1 << 17
_QUOTE = 0x27
_options: dict[str, Any] = {"nogil": True, "cache": True}


@njit(inline="always", **_options)
def _char(data, i):
    """(code point, length in bytes) of the UTF-8 character at `i`."""
    b = np.int64(data[i])
    if b < 0x80:
        return b, 1
    if b < 0xE0:
        return (b & 0x1F) << 6 | (data[i + 1] & 0x3F), 2
    if b < 0xF0:
        return (b & 0x0F) << 12 | (data[i + 1] & 0x3F) << 6 | (data[i + 2] & 0x3F), 3
    return (b & 0x07) << 18 | (data[i + 1] & 0x3F) << 12 | (data[i + 2] & 0x3F) << 6 | (data[i + 3] & 0x3F), 4


@njit(**_options)
def _run(data, i, end, classes, wanted):
    """Index behind the run of characters of one class that starts at `i`."""
    while i < end:
        code, length = _char(data, i)
        if classes[code] != wanted:
            break
        i += length
    return i


@njit(**_options)
def _suffix(data, i, end, any_case):
    """Index behind an English suffix ('s 't 're 've 'm 'll 'd) at the quote `i`, or `i` when there is none."""
    if i + 1 >= end:
        return i
    a = data[i + 1]
    if any_case:
        if a == 0xC5 and i + 2 < end and data[i + 2] == 0xBF:  # U+017F, which folds to "s"
            return i + 3
        if 0x41 <= a <= 0x5A:
            a |= 0x20
    if a == 0x73 or a == 0x74 or a == 0x6D or a == 0x64:  # s t m d
        return i + 2
    if i + 2 < end:
        b = data[i + 2]
        if any_case and 0x41 <= b <= 0x5A:
            b |= 0x20
        if (a == 0x72 or a == 0x76) and b == 0x65:  # re ve
            return i + 3
        if a == 0x6C and b == 0x6C:  # ll
            return i + 3
    return i


@njit(**_options)
def word_end(data, i, end, classes, rule):
    """Index behind the word that starts at `i` of a text that ends at `end` (see rules.Rule)."""
    any_prefix, max_numbers, numbers_end_text, whole_tail = rule[0], rule[1], rule[2], rule[3]
    code, length = _char(data, i)
    kind = classes[code]
    if code == _QUOTE:
        behind = _suffix(data, i, end, any_prefix)
        if behind > i:
            return behind
    if kind == LETTER:
        return _run(data, i, end, classes, LETTER)
    j = i + length
    if kind == NUMBER:
        taken = 1
        while j < end and (max_numbers == 0 or taken < max_numbers):
            code, length = _char(data, j)
            if classes[code] != NUMBER:
                break
            j += length
            taken += 1
        return j
    following = -1
    if j < end:
        code, _ = _char(data, j)
        following = np.int64(classes[code])
    if following == LETTER and (kind == BLANK or (any_prefix and kind != NEWLINE)):
        return _run(data, j, end, classes, LETTER)
    if kind == OTHER or (kind == BLANK and following == OTHER):
        j = _run(data, j, end, classes, OTHER)
        if any_prefix:
            j = _run(data, j, end, classes, NEWLINE)
        return j
    if kind == BLANK and following == NUMBER and not any_prefix and not numbers_end_text:
        return _run(data, j, end, classes, NUMBER)
    # White space: `last` is where the last one of the run starts, `line` the index behind the last line end in it.
    last, line, j = i, np.int64(-1), i
    following = -1
    while j < end:
        code, length = _char(data, j)
        following = np.int64(classes[code])
        if following < 3:
            break
        last = j
        j += length
        if following == NEWLINE:
            line = j
    at_end = j == end
    if at_end and whole_tail:
        return j
    if any_prefix and line > 0:
        return line
    if at_end or last == i or (numbers_end_text and following == NUMBER):
        return j
    return last


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
def _merge_short(ids, n, at, keys, ranks, joined):
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
def _merge_long(ids, n, keys, ranks, joined):
    """Merge the first `n` of `ids` in place through a queue over a linked list, O(n log n); returns how many are left."""
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
    """Encode texts `first` to `last`; ids go to `out`, the index behind each text (-1: redo in Python) to `out_ends`."""
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
                    n = _merge_short(scratch, n, at, keys, ranks, joined)
                else:
                    n = _merge_long(scratch, n, keys, ranks, joined)
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
    return list(zip(edges, edges[1:], strict=False))


def compile_now() -> None:
    """Compile every kernel by running them once on a tiny vocabulary."""
    data = np.frombuffer(b"ab  ab's " + b"ab" * 40, np.uint8)
    ends = np.array([3, len(data)], np.int64)
    classes = np.zeros(128, np.uint8)
    classes.flags.writeable = False
    keys = np.full(16, -1, np.int64)
    empty = np.zeros(16, np.int32)

    class Table:
        pass

    table = Table()
    table.keys, table.ranks, table.joined, table.byte_ids = keys, empty, empty, np.arange(256, dtype=np.int32)  # type: ignore[attr-defined]
    known = (np.frombuffer(b"ab", np.uint8), np.array([2], np.int64), np.array([7], np.int32))
    encode_texts(data, ends, 0, 2, classes, np.array([0, 0, 0, 0], np.int64), table, new_cache(known))
