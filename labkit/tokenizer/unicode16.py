r"""Which characters are letters, digits and spaces: the classes that pre-tokenizer patterns are written in.

``\p{L}`` means a different set in every Unicode version: Python 3.10 knows Unicode 13, Python 3.13 knows 15.1, and the
`regex` package follows its own calendar. Token ids must not depend on that, so labkit carries one table, Unicode 16.0 -
the version that the regex engines inside `tokenizers` and `tiktoken` use.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import lru_cache

from labkit.tokenizer.unicode16_data import RUNS

MAX_CODE_POINT = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]  # inclusive, sorted, disjoint, not touching

# Unicode's White_Space property, which is what \s means to the reference engines (Python's own \s adds U+001C..U+001F).
WHITE_SPACE: Ranges = (
    (0x09, 0x0D), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
    (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000),
)  # fmt: skip

# Numbers that Unicode 17.0 added. The `Digits` step of `tokenizers` follows Rust's newer table, its regexes follow
# 16.0.
NUMBERS_OF_UNICODE_17: Ranges = ((0x11DE0, 0x11DE9), (0x16FF4, 0x16FF6))

# Ideographs and kana, for the patterns that name a script.
HAN: Ranges = (
    (0x2E80, 0x2E99), (0x2E9B, 0x2EF3), (0x2F00, 0x2FD5), (0x3005, 0x3005), (0x3007, 0x3007), (0x3021, 0x3029),
    (0x3038, 0x303B), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFA6D), (0xFA70, 0xFAD9), (0x16FE2, 0x16FE3),
    (0x16FF0, 0x16FF1), (0x20000, 0x2A6DF), (0x2A700, 0x2B739), (0x2B740, 0x2B81D), (0x2B820, 0x2CEA1),
    (0x2CEB0, 0x2EBE0), (0x2EBF0, 0x2EE5D), (0x2F800, 0x2FA1D), (0x30000, 0x3134A), (0x31350, 0x323AF),
)  # fmt: skip


@lru_cache(maxsize=1)
def category_runs() -> tuple[tuple[str, int, int], ...]:
    """The table as (category, first code point, last code point), in order, covering all of Unicode."""
    runs, start = [], 0
    for category, count in re.findall(r"([A-Z][a-z])(\d*)", RUNS):
        stop = start + int(count or 1)
        runs.append((category, start, stop - 1))
        start = stop
    assert start == MAX_CODE_POINT + 1, hex(start)
    return tuple(runs)


@lru_cache(maxsize=64)
def ranges(name: str) -> Ranges:
    r"""The code points of ``\p{name}``: a general category ("Lu"), a group of them ("L"), "Han" or "White_Space".

    >>> sum(hi - lo + 1 for lo, hi in ranges("Nd"))
    760
    """
    if name in ("White_Space", "Space"):
        return WHITE_SPACE
    if name in ("Han", "Script=Han"):
        return HAN
    found = tuple((lo, hi) for category, lo, hi in category_runs() if category.startswith(name))
    if not found or not name:
        raise ValueError(f"\\p{{{name}}} is not a class this tokenizer knows (general categories, Han, White_Space)")
    return union(found)


@lru_cache(maxsize=1)
def _word_starts() -> tuple[list[int], list[int]]:
    r"""The first and last code points of the ranges of \w: letters, marks, decimal and letter numbers, connectors."""
    circled = ((0x24B6, 0x24E9), (0x1F130, 0x1F149), (0x1F150, 0x1F169), (0x1F170, 0x1F189))  # alphabetic symbols
    joiners = ((0x200C, 0x200D),)
    word = union(*(ranges(name) for name in ("L", "M", "Nd", "Nl", "Pc")), circled, joiners)
    return [low for low, _ in word], [high for _, high in word]


def is_word_character(char: str) -> bool:
    r"""Whether \w matches, as Unicode's UTS 18 defines it (Python's own \w leaves out marks and takes in fractions)."""
    lows, highs = _word_starts()
    at = bisect_right(lows, ord(char)) - 1
    return at >= 0 and ord(char) <= highs[at]


def union(*sets: Ranges) -> Ranges:
    """The set union of code point ranges.

    >>> union(((1, 3),), ((4, 5), (9, 9)))
    ((1, 5), (9, 9))
    """
    merged: list[list[int]] = []
    for lo, hi in sorted(pair for one in sets for pair in one):
        if merged and lo <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], hi)
        else:
            merged.append([lo, hi])
    return tuple((lo, hi) for lo, hi in merged)


def complement(one: Ranges) -> Ranges:
    """Every code point that is not in the set."""
    gaps, start = [], 0
    for lo, hi in union(one):
        if lo > start:
            gaps.append((start, lo - 1))
        start = hi + 1
    if start <= MAX_CODE_POINT:
        gaps.append((start, MAX_CODE_POINT))
    return tuple(gaps)


def clip(one: Ranges, lowest: int, highest: int) -> Ranges:
    """The part of the set between two code points, both included."""
    return tuple((max(lo, lowest), min(hi, highest)) for lo, hi in one if lo <= highest and hi >= lowest)
