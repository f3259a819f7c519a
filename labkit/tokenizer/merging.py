"""Applying merges to one word: the rule of BPE, and the same rule for long words in O(n log n).

**The rule** (Sennrich et al. 2016): start from single symbols; while some adjacent pair is in the merge table, join the
pair of lowest rank, the left-most one if several have it. A word of n symbols takes at most n - 1 joins. Looking for
the lowest rank afresh after each join costs O(n^2), which is fastest up to some forty symbols and hopeless for a
megabyte of "aaaa"; a priority queue over a linked list gives the same joins in the same order in O(n log n).

A merge table is a dict from "left right" (a space between; no symbol contains one) to the rank: exactly the strings
that tokenizer files hold, so loading one costs a single pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

SCAN_LIMIT = 40  # symbols; above it the queue wins (benchmarks/tokenizer.py --crossover)
_NO_RANK = 1 << 62
_POSITION_BITS = 32


def merge_word(symbols: list[str], ranks: Mapping[str, int]) -> list[str]:
    """The tokens of one word.

    >>> merge_word(list("hugs"), {"u g": 0, "h ug": 1})
    ['hug', 's']
    """
    return _merge_by_scan(symbols, ranks) if len(symbols) <= SCAN_LIMIT else _merge_by_queue(symbols, ranks)


def _merge_by_scan(symbols: list[str], ranks: Mapping[str, int]) -> list[str]:
    parts = list(symbols)
    get = ranks.get
    rank_at = [get(f"{a} {b}", _NO_RANK) for a, b in pairwise(parts)]  # of the pair (i, i + 1)
    while rank_at:
        lowest = min(rank_at)
        if lowest == _NO_RANK:
            break
        i = rank_at.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
        del rank_at[i]
        if i < len(rank_at):
            rank_at[i] = get(f"{parts[i]} {parts[i + 1]}", _NO_RANK)
        if i:
            rank_at[i - 1] = get(f"{parts[i - 1]} {parts[i]}", _NO_RANK)
    return parts


def _merge_by_queue(symbols: list[str], ranks: Mapping[str, int]) -> list[str]:
    parts: list[str | None] = list(symbols)  # None: joined into the part on its left
    n = len(parts)
    after = [*range(1, n), -1]
    before = [*range(-1, n - 1)]
    get = ranks.get
    # A queue entry is rank << 32 | position of the pair's left part: ordered by rank, then from the left.
    queue = []
    for i in range(n - 1):
        rank = get(f"{symbols[i]} {symbols[i + 1]}")
        if rank is not None:
            queue.append(rank << _POSITION_BITS | i)
    heapify(queue)
    mask = (1 << _POSITION_BITS) - 1
    while queue:
        entry = heappop(queue)
        i = entry & mask
        left, j = parts[i], after[i]
        if left is None or j < 0:
            continue
        right = parts[j]
        if get(f"{left} {right}") != entry >> _POSITION_BITS:  # the pair that was queued here has changed since
            continue
        joined = f"{left}{right}"
        parts[i], parts[j] = joined, None
        k = after[i] = after[j]
        if k >= 0:
            before[k] = i
            rank = get(f"{joined} {parts[k]}")
            if rank is not None:
                heappush(queue, rank << _POSITION_BITS | i)
        h = before[i]
        if h >= 0:
            rank = get(f"{parts[h]} {joined}")
            if rank is not None:
                heappush(queue, rank << _POSITION_BITS | h)
    return [part for part in parts if part is not None]


REAL_SPACE = "\ud800"
"""What a space is written as inside symbols and merge tables: a lone surrogate, which no text can hold."""


def merge_ranks(merges: Iterable[Any], vocab: Mapping[str, int]) -> dict[str, int]:
    """ "left right" -> rank, from a list of such strings or of pairs; ValueError for a merge that makes no token.

    Parts may hold spaces when they come as pairs: see ``REAL_SPACE``.
    """
    lines = [
        merge if isinstance(merge, str) else " ".join([part.replace(" ", REAL_SPACE) for part in merge])
        for merge in merges
    ]
    ranks = {merge: rank for rank, merge in enumerate(lines)}
    for merge in ranks:
        if merge.count(" ") != 1 or merge.replace(" ", "").replace(REAL_SPACE, " ") not in vocab:
            raise ValueError(
                f"merge {ranks[merge]} of the tokenizer file is {merge!r}, which does not join two parts into a token "
                "of the vocabulary: the file is damaged or of another kind"
            )
    return ranks


class JoinedRanks(Mapping[str, int]):
    """A merge table that is implied by the vocabulary: any two parts merge if together they are a token.

    The rank of "left right" is the rank of the joined token. SentencePiece's scores and tiktoken's rank files mean
    this.

    >>> JoinedRanks({"ab": 7}).get("a b")
    7
    """

    def __init__(self, rank_of: Mapping[str, int]) -> None:
        self.rank_of = rank_of

    def get(self, pair: str, default: Any = None) -> Any:
        return self.rank_of.get(pair.replace(" ", "", 1), default)

    def __getitem__(self, pair: str) -> int:
        return self.rank_of[pair.replace(" ", "", 1)]

    def __iter__(self) -> Any:
        raise TypeError("an implied merge table has no list of merges")

    def __len__(self) -> int:
        return len(self.rank_of)
