"""A tokenizer's merges as arrays of ids: what compiled code and tensor operations look merges up in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.tokenizer.byte_level import ALPHABET
from labkit.tokenizer.merging import JoinedRanks

if TYPE_CHECKING:
    from labkit.tokenizer.words import WordEncoder

EMPTY = -1  # the key of a free slot


@dataclass(frozen=True)
class MergeTable:
    """An open-addressing hash table: pair (left, right) -> (rank, joined id); linear probing.

    The key is ``left << 32 | right``; its first slot is :func:`first_slot`. `max_probes` is the longest search that
    finds a key, so a vectorised look-up may simply take that many steps.
    """

    keys: Any  # int64 (n_slots,), EMPTY where free
    ranks: Any  # int32 (n_slots,)
    joined: Any  # int32 (n_slots,)
    byte_ids: Any  # int32 (256,), EMPTY for a byte without a token
    max_probes: int

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.ranks.nbytes + self.joined.nbytes + self.byte_ids.nbytes


def first_slot(keys: Any, n_slots: int) -> Any:
    """Where the search for a key begins: a multiplicative hash's middle bits, computed in int64 that wraps."""
    return ((keys * -7046029254386353131) >> 20) & (n_slots - 1)


def build(words: WordEncoder) -> MergeTable:
    """The table of a byte-level vocabulary."""
    import numpy as np

    vocab = words.vocab
    columns = np.array(list(_merges(vocab, words.ranks)), np.int64).reshape(-1, 4)  # left, right, rank, joined
    n_slots = 1 << max(4, (2 * len(columns) + 1).bit_length())
    keys = np.full(n_slots, EMPTY, np.int64)
    ranks = np.zeros(n_slots, np.int32)
    joined = np.zeros(n_slots, np.int32)
    wanted = columns[:, 0] << 32 | columns[:, 1]
    slots = first_slot(wanted, n_slots)
    waiting = np.arange(len(columns))
    probes = 0
    while len(waiting):  # every round, each free slot takes one of the merges that want it; the others look one further
        probes += 1
        free = keys[slots[waiting]] == EMPTY
        takers = waiting[free]
        keys[slots[takers]] = wanted[takers]  # where two want one slot, the last write wins
        won = takers[keys[slots[takers]] == wanted[takers]]
        ranks[slots[won]], joined[slots[won]] = columns[won, 2], columns[won, 3]
        lost = np.ones(len(columns), bool)
        lost[won] = False
        waiting = waiting[lost[waiting]]
        slots[waiting] = (slots[waiting] + 1) & (n_slots - 1)
    byte_ids = np.array([vocab.get(symbol, EMPTY) for symbol in ALPHABET], np.int32)
    return MergeTable(keys, ranks, joined, byte_ids, max(1, probes))


def _merges(vocab: Mapping[str, int], ranks: Mapping[str, int]) -> Iterator[tuple[int, int, int, int]]:
    if isinstance(ranks, JoinedRanks):  # any two parts that join into a token
        for token, rank in ranks.rank_of.items():
            for cut in range(1, len(token)):
                left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
                if left is not None and right is not None:
                    yield left, right, rank, vocab[token]
        return
    for pair, rank in ranks.items():
        left, right = pair.split(" ")
        if left in vocab and right in vocab:
            yield vocab[left], vocab[right], rank, vocab[left + right]
