"""From a pre-tokenized word to its token ids, with a bounded cache: natural text repeats its words.

The cache *is* the encoder: a dict whose ``__missing__`` runs the merges, so that ``map(words.__getitem__, pieces)``
costs one dictionary lookup for a word seen before and stays inside C.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping

from labkit.tokenizer.byte_level import ALPHABET, to_symbols
from labkit.tokenizer.merging import merge_word

CACHE_WORDS = 1 << 17  # at some 150 bytes an entry, at most about 20 MB
CACHE_WORD_CHARS = 48  # longer words hardly ever repeat
UNENCODABLE_POLICIES = ("warn", "error", "replace", "drop")


class UnencodableWarning(UserWarning):
    """Some characters of the text have no token in this vocabulary and are missing from the ids."""


class WordEncoder(dict[str, tuple[int, ...]]):
    """word -> token ids, cached. Subclasses spell the word in the vocabulary's symbols."""

    def __init__(self, vocab: Mapping[str, int], ranks: Mapping[str, int], *, ignore_merges: bool = False) -> None:
        super().__init__()
        self.vocab = vocab
        self.ranks = ranks
        self.ignore_merges = ignore_merges
        self.lost: Counter[str] = Counter()  # characters left out since the last report()
        self.on_unencodable = "warn"

    def spell(self, word: str) -> tuple[str | list[str], bool]:
        """The word as vocabulary symbols, and whether every character could be spelled."""
        raise NotImplementedError

    def __missing__(self, word: str) -> tuple[int, ...]:
        symbols, complete = self.spell(word)
        vocab = self.vocab
        whole = vocab.get("".join(symbols)) if self.ignore_merges else None
        if whole is not None:
            ids = (whole,)
        else:
            ids = tuple([vocab[token] for token in merge_word(list(symbols), self.ranks)])
        if complete and len(word) <= CACHE_WORD_CHARS:  # an incomplete one must be reported again the next time
            if len(self) >= CACHE_WORDS:
                self.clear()
            self[word] = ids
        return ids

    def report(self) -> None:
        """Tell of the characters that were left out, once for a call of encode; nothing when there were none."""
        if not self.lost:
            return
        lost, self.lost = self.lost, Counter()
        shown = ", ".join(f"{char!r} (U+{ord(char):04X}) x {count}" for char, count in lost.most_common(5))
        message = (
            f"{sum(lost.values())} character(s) have no token in this vocabulary: {shown}. "
            'tokenizer.on_unencodable chooses what happens: "warn" (leave out and say so), "drop" (leave out), '
            '"replace" (with U+FFFD) or "error".'
        )
        if self.on_unencodable == "error":
            raise ValueError(message)
        if self.on_unencodable == "warn":
            warnings.warn(message, UnencodableWarning, stacklevel=3)


class ByteWords(WordEncoder):
    """Byte-level vocabularies: a word is its UTF-8 bytes, written in GPT-2's alphabet."""

    def __init__(
        self,
        vocab: Mapping[str, int],
        ranks: Mapping[str, int],
        *,
        ignore_merges: bool = False,
        unknown: str | None = None,
    ) -> None:
        super().__init__(vocab, ranks, ignore_merges=ignore_merges)
        self.missing = frozenset(symbol for symbol in ALPHABET if symbol not in vocab)
        self.unknown = unknown

    def spell(self, word: str) -> tuple[str | list[str], bool]:
        symbols = to_symbols(word.encode())
        if not self.missing or self.missing.isdisjoint(symbols):
            return symbols, True
        if self.unknown is not None:
            return [self.unknown if symbol in self.missing else symbol for symbol in symbols], True
        lost = [char for char in word if not self.missing.isdisjoint(to_symbols(char.encode()))]
        self.lost.update(lost)
        if self.on_unencodable == "replace":
            return to_symbols("".join("\N{REPLACEMENT CHARACTER}" if c in lost else c for c in word).encode()), False
        # As the reference does: only the bytes that have no token go, and what stood on both sides may merge.
        return [symbol for symbol in symbols if symbol not in self.missing], False


def surrogate_error(text: str) -> ValueError:
    """The error for a text with a lone surrogate: where it is and how to repair it."""
    at = next(i for i, char in enumerate(text) if 0xD800 <= ord(char) <= 0xDFFF)
    return ValueError(
        f"the text holds a lone surrogate (U+{ord(text[at]):04X} at index {at}), which is not a character and has no "
        'UTF-8 form; repair it first: text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")'
    )
