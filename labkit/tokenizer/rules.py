"""The split patterns as a few numbers, for the scanners that cut text without a regex engine (compiled, or on a GPU).

The GPT-2 and the Llama-3 families of patterns can be decided from five character classes and a look at most one
character ahead of a run. :func:`rule_of` says which rule a pattern is, or None: then the regex engine does the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from labkit.tokenizer import patterns, unicode16

OTHER, LETTER, NUMBER, SPACE, BLANK, NEWLINE = range(6)  # BLANK is " "; SPACE any other white space but CR and LF


@dataclass(frozen=True)
class Rule:
    """One pattern family with its settings.

    `any_prefix`: Llama-3's family, where any one character but CR, LF, letters and numbers joins the letters behind it,
    suffixes ('s, 'LL) match in any case, and line ends cling to what is in front. Otherwise GPT-2's, where only a space
    joins what follows.
    """

    any_prefix: bool
    max_numbers: int  # in one word; 0: no limit
    numbers_end_text: bool = False  # SmolLM: each number is split off first, so a number ends the text in front of it
    marks_are_letters: bool = False  # Qwen3.5: \p{M} counts as \p{L}
    whole_tail: bool = False  # cl100k: white space at the end of the text is one word
    unicode17_numbers: bool = False


RULES: dict[str, Rule] = {
    patterns.GPT2: Rule(any_prefix=False, max_numbers=0),
    patterns.SMOLLM: Rule(any_prefix=False, max_numbers=1, numbers_end_text=True, unicode17_numbers=True),
    patterns.LLAMA3: Rule(any_prefix=True, max_numbers=3),
    patterns.QWEN2: Rule(any_prefix=True, max_numbers=1),
    patterns.QWEN35: Rule(any_prefix=True, max_numbers=1, marks_are_letters=True),
    patterns.CL100K: Rule(any_prefix=True, max_numbers=3, whole_tail=True),
}


def rule_of(pretokenize: Any) -> Rule | None:
    """The rule of a pre-tokenizer, when it is one of the families."""
    found = getattr(pretokenize, "patterns", ())
    return RULES.get(found[0]) if len(found) == 1 else None


@lru_cache(maxsize=8)
def class_table(rule: Rule) -> Any:
    """The class of every code point, uint8 of shape (0x110000,)."""
    import numpy as np

    table = np.full(unicode16.MAX_CODE_POINT + 1, OTHER, np.uint8)
    letters = [unicode16.ranges("L")] + ([unicode16.ranges("M")] if rule.marks_are_letters else [])
    numbers = [unicode16.ranges("N")] + ([unicode16.NUMBERS_OF_UNICODE_17] if rule.unicode17_numbers else [])
    for code, sets in ((LETTER, letters), (NUMBER, numbers), (SPACE, [unicode16.WHITE_SPACE])):
        for low, high in unicode16.union(*sets):
            table[low : high + 1] = code
    table[0x20], table[0x0A], table[0x0D] = BLANK, NEWLINE, NEWLINE
    table.flags.writeable = False
    return table
