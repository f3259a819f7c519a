"""Byte-pair encoding to learn from: train it, step through its merges, watch one word being encoded.

**Train** (Gage 1994; Sennrich et al. 2016, algorithm 1): write every word in its bytes; then, again and again, find
the adjacent
pair that occurs most often, give it a new id, and replace it everywhere. Each replacement is one :class:`Merge`;
their order
is all there is to remember.

**Encode**: start from bytes and apply the merges in the order they were learned: the pair of lowest rank first.

This file is the plain algorithm. The same merges run fast through :meth:`BPE.to_tokenizer`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import TYPE_CHECKING

from labkit.tokenizer.byte_level import ALPHABET, BYTE_OF, to_symbols
from labkit.tokenizer.patterns import GPT2
from labkit.tokenizer.pretokenize import PreTokenizer

if TYPE_CHECKING:
    from labkit.tokenizer.tokenizer import Tokenizer

N_BYTES = 256
# Ids 0-255 are the bytes in the order of GPT-2's alphabet: "!" is 0, "a" is 64, the space is 220.
BYTE_TOKENS: tuple[bytes, ...] = tuple(bytes([BYTE_OF[symbol]]) for symbol in sorted(ALPHABET))
BYTE_ID: dict[int, int] = {token[0]: i for i, token in enumerate(BYTE_TOKENS)}

Pair = tuple[int, int]


@dataclass(frozen=True)
class Merge:
    """One learned rule: wherever `left` stands before `right`, they become the token `token_id`."""

    rank: int  # 0 for the first one learned
    pair: Pair  # the ids of left and right
    token_id: int  # N_BYTES + rank
    left: bytes
    right: bytes
    count: int  # how often the pair occurred in the training text when it was chosen

    @property
    def token(self) -> bytes:
        """The bytes of the new token."""
        return self.left + self.right

    def __str__(self) -> str:
        left, right, token = (part.decode("utf-8", "replace") for part in (self.left, self.right, self.token))
        return f"{self.rank}: {left!r} + {right!r} -> {token!r} (seen {self.count} times)"


@dataclass(frozen=True)
class TraceStep:
    """The state of one word after a merge; the first step of a trace has no merge."""

    ids: tuple[int, ...]
    merge: Merge | None
    at: int | None  # index in `ids` of the token that this merge made


def merge(ids: Sequence[int], pair: Pair, token_id: int) -> list[int]:
    """`ids` with each occurrence of `pair`, from the left and without overlap, replaced by `token_id`.

    >>> merge([1, 1, 1, 2], (1, 1), 9)
    [9, 1, 2]
    """
    merged: list[int] = []
    i = 0
    while i < len(ids):
        if tuple(ids[i : i + 2]) == pair:
            merged.append(token_id)
            i += 2
        else:
            merged.append(ids[i])
            i += 1
    return merged


def train(
    texts: Iterable[str],
    vocab_size: int,
    *,
    pattern: str = GPT2,
    special_tokens: Sequence[str] = (),
    min_count: int = 1,
) -> BPE:
    """Learn a vocabulary of `vocab_size` tokens: 256 bytes, the merges, and `special_tokens` at the end.

    Training stops early when no pair occurs at least `min_count` times. Ties go to the pair of lower ids, as in
    `tokenizers`. Raises ValueError for a vocab_size that leaves no room.

    >>> bpe = train(["low lower lowest"], 259)
    >>> print(*bpe.merges, sep="\\n")
    0: 'l' + 'o' -> 'lo' (seen 3 times)
    1: 'lo' + 'w' -> 'low' (seen 3 times)
    2: ' ' + 'low' -> ' low' (seen 2 times)
    """
    n_merges = vocab_size - N_BYTES - len(special_tokens)
    if n_merges < 0:
        raise ValueError(
            f"vocab_size {vocab_size} is too small: {N_BYTES} bytes and {len(special_tokens)} special tokens come first"
        )
    merges = []
    for learned in train_steps(texts, pattern=pattern, min_count=min_count):
        if len(merges) == n_merges:
            break
        merges.append(learned)
    return BPE(merges, pattern=pattern, special_tokens=special_tokens)


def train_steps(texts: Iterable[str], *, pattern: str = GPT2, min_count: int = 1) -> Iterator[Merge]:
    """The merges one by one, without end until no pair is left: training that a widget can step through.

    Only the words that hold the chosen pair are touched, and their pair counts corrected, so a step costs what it
    changes.
    """
    split = PreTokenizer([pattern])
    occurrences = Counter(word for text in texts for word in split(text))
    words = [[BYTE_ID[byte] for byte in word.encode("utf-8", "replace")] for word in occurrences]
    n_seen = list(occurrences.values())
    token_of = list(BYTE_TOKENS)

    counts: Counter[Pair] = Counter()
    holders: defaultdict[Pair, set[int]] = defaultdict(set)  # the words in which a pair may occur
    for w, ids in enumerate(words):
        for pair in pairwise(ids):
            counts[pair] += n_seen[w]
            holders[pair].add(w)
    queue = [(-count, pair) for pair, count in counts.items()]  # most frequent first, then the lower ids
    heapify(queue)

    while queue:
        negative, pair = heappop(queue)
        if -negative != counts[pair]:  # stale: the count has changed since
            if counts[pair] > 0:
                heappush(queue, (-counts[pair], pair))
            continue
        if -negative < min_count:
            return
        token_id = len(token_of)
        left, right = token_of[pair[0]], token_of[pair[1]]
        token_of.append(left + right)
        created: Counter[Pair] = Counter()
        for w in holders.pop(pair):
            before = words[w]
            after = words[w] = merge(before, pair, token_id)
            for old in pairwise(before):
                counts[old] -= n_seen[w]
            for new in pairwise(after):
                counts[new] += n_seen[w]
                if token_id in new:
                    created[new] += 1
                    holders[new].add(w)
        for new in created:
            heappush(queue, (-counts[new], new))
        counts.pop(pair, None)
        yield Merge(token_id - N_BYTES, pair, token_id, left, right, -negative)


class BPE:
    """A trained byte-level BPE: its merges in order, and the plain algorithms that use them."""

    def __init__(self, merges: Sequence[Merge], *, pattern: str = GPT2, special_tokens: Sequence[str] = ()) -> None:
        self.merges: tuple[Merge, ...] = tuple(merges)
        self.pattern = pattern
        self.tokens: list[bytes] = [*BYTE_TOKENS, *(learned.token for learned in self.merges)]
        self.special_tokens = {text: len(self.tokens) + i for i, text in enumerate(special_tokens)}
        self._split = PreTokenizer([pattern])
        self._by_pair = {learned.pair: learned for learned in self.merges}

    @property
    def vocab_size(self) -> int:
        return len(self.tokens) + len(self.special_tokens)

    def words(self, text: str) -> list[str]:
        """The pieces inside which merges happen."""
        return self._split(text)

    def encode(self, text: str, *, n_merges: int | None = None) -> list[int]:
        """The ids of a text using only the first `n_merges` merges (all by default): a slider from bytes to words.

        >>> bpe = train(["low lower lowest"], 259)
        >>> [len(bpe.encode("lowest", n_merges=n)) for n in range(4)]
        [6, 5, 4, 4]
        """
        return [i for word in self.words(text) for i in self.trace(word, n_merges=n_merges)[-1].ids]

    def trace(self, word: str, *, n_merges: int | None = None) -> list[TraceStep]:
        """Every state of one word, from its bytes to its tokens, with the merge that led to each."""
        limit = len(self.merges) if n_merges is None else n_merges
        ids = [BYTE_ID[byte] for byte in word.encode()]
        steps = [TraceStep(tuple(ids), None, None)]
        while True:
            known = [self._by_pair[pair] for pair in pairwise(ids) if pair in self._by_pair]
            best = min(known, key=lambda learned: learned.rank, default=None)
            if best is None or best.rank >= limit:
                return steps
            at = list(pairwise(ids)).index(best.pair)
            ids[at : at + 2] = [best.token_id]
            steps.append(TraceStep(tuple(ids), best, at))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD."""
        spelled = [*self.tokens, *(text.encode() for text in self.special_tokens)]
        return b"".join(spelled[i] for i in ids).decode("utf-8", "replace")

    def to_tokenizer(self) -> Tokenizer:
        """The same vocabulary as a fast :class:`~labkit.tokenizer.Tokenizer`, with the same ids."""
        from labkit.tokenizer.added import AddedToken, AddedTokens
        from labkit.tokenizer.codec import ByteLevelCodec
        from labkit.tokenizer.tokenizer import Tokenizer
        from labkit.tokenizer.words import ByteWords

        symbols = [to_symbols(token) for token in self.tokens]
        ranks = {f"{to_symbols(m.left)} {to_symbols(m.right)}": m.rank for m in self.merges}
        names = {i: text for text, i in self.special_tokens.items()}
        return Tokenizer(
            kind="byte-level BPE",
            words=ByteWords({symbol: i for i, symbol in enumerate(symbols)}, ranks),
            pretokenize=PreTokenizer([self.pattern]),
            added=AddedTokens(AddedToken(text, i) for i, text in names.items()),
            codec=ByteLevelCodec(dict(enumerate(symbols)) | names, frozenset(names)),
            vocab_size=self.vocab_size,
        )
