"""Added tokens: strings such as ``<|im_start|>`` that are one token wherever they stand in a text.

They are cut out of the text before anything else happens to it, so no merge ever crosses them. The semantics are those
of `tokenizers`: left-most match, the longest one first; ``lstrip`` and ``rstrip`` swallow the whitespace beside a
match; ``single_word`` wants no word character on either side; ``normalized`` tokens are looked for in the normalized
text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from labkit.tokenizer.unicode16 import WHITE_SPACE, is_word_character

SPACES = "".join(chr(code) for low, high in WHITE_SPACE for code in range(low, high + 1))


@dataclass(frozen=True)
class AddedToken:
    """One added token; ``special`` ones are the model's control codes, which decoding can leave out."""

    content: str
    id: int
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


class AddedTokens:
    """Cuts a text at its added tokens, and normalizes what is left."""

    def __init__(self, tokens: Iterable[AddedToken], normalize: Callable[[str], str] | None = None) -> None:
        self.tokens = tuple(token for token in tokens if token.content)
        self.contents = frozenset(token.content for token in self.tokens)
        self.normalize = normalize
        self._raw = _Matcher([token for token in self.tokens if not token.normalized], None)
        self._normalized = _Matcher([token for token in self.tokens if token.normalized], normalize)

    def split(self, text: str, parse_special: bool = True) -> list[str | int]:
        """The text as pieces of (normalized) plain text and the ids of the added tokens between them.

        >>> AddedTokens([AddedToken("<s>", 1)]).split("a<s>b")
        ['a', 1, 'b']
        """
        pieces: list[str | int] = self._raw.split(text, parse_special) if self._raw.tokens else [text]
        if self.normalize is None and not self._normalized.tokens:
            return pieces
        out: list[str | int] = []
        for piece in pieces:
            if isinstance(piece, int):
                out.append(piece)
                continue
            plain = self.normalize(piece) if self.normalize else piece
            out += self._normalized.split(plain, parse_special) if self._normalized.tokens else [plain]
        return out


class _Matcher:
    def __init__(self, tokens: list[AddedToken], normalize: Callable[[str], str] | None) -> None:
        self.tokens = {(normalize(token.content) if normalize else token.content): token for token in tokens}
        longest_first = sorted(self.tokens, key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, longest_first))).finditer

    def split(self, text: str, parse_special: bool) -> list[str | int]:
        pieces: list[str | int] = []
        end = 0  # of what has been cut off so far
        for match in self._find(text):
            start, stop = match.span()
            token = self.tokens[match.group()]
            if start < end or (token.special and not parse_special):
                continue
            if token.single_word and (_is_word(text[start - 1 : start]) or _is_word(text[stop : stop + 1])):
                continue
            if token.lstrip:
                while start > end and text[start - 1] in SPACES:
                    start -= 1
            if token.rstrip:
                while stop < len(text) and text[stop] in SPACES:
                    stop += 1
            if start > end:
                pieces.append(text[end:start])
            pieces.append(token.id)
            end = stop
        if end < len(text):
            pieces.append(text[end:])
        return pieces


def _is_word(char: str) -> bool:
    return bool(char) and is_word_character(char)
