"""Pre-tokenization: cutting plain text into the words inside which merges happen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from labkit.tokenizer.patterns import COVERS_EVERYTHING, KNOWN
from labkit.tokenizer.translate import Finder

Splitter = Callable[[str, bool], list[str]]  # (text, whether it begins the whole text) -> words


class PreTokenizer:
    """A sequence of splits, each run on the pieces of the one before; the pieces always join back into the text.

    >>> from labkit.tokenizer.patterns import SMOLLM
    >>> PreTokenizer([SMOLLM])("It's  42 µm.")
    ['It', "'s", '  ', '4', '2', ' µm', '.']
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = tuple(patterns)
        self._steps = [
            Finder(pattern, whole=pattern not in COVERS_EVERYTHING, known=pattern in KNOWN) for pattern in self.patterns
        ]

    def __call__(self, text: str, at_start: bool = True) -> list[str]:
        if not self._steps:
            return [text] if text else []
        words = self._steps[0](text)
        for step in self._steps[1:]:
            words = [piece for word in words for piece in step(word)]
        return words


class PrefixSpace:
    """Another pre-tokenizer, for vocabularies that want every text to begin with a space (``add_prefix_space``)."""

    def __init__(self, inner: Splitter) -> None:
        self.inner = inner

    def __call__(self, text: str, at_start: bool = True) -> list[str]:
        return self.inner(text if not text or text[0] == " " else " " + text, at_start)
