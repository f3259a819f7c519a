"""Texts to compare on: a fixed corpus of 1 MB that every Python installation can make, and strategies for
Hypothesis."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from pydoc_data.topics import topics

from hypothesis import strategies as st

_CHINESE = (
    "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出就分对成会可主发年动同工也能下过子说产种面而方后多"
)
_ARABIC = ["السلام", "عليكم", "ورحمة", "الله،", "كيف", "حالك", "اليوم؟", "نتعلم", "معاً", "النماذج", "اللغوية", "١٢٣"]
_HINDI = ["नमस्ते", "दुनिया,", "भाषा", "मॉडल", "शब्दों", "को", "टुकड़ों", "में", "बाँटते", "हैं", "१२३"]
_EMOJI = ["😀", "👩‍👩‍👧‍👦", "🇫🇷", "👍🏽", "❤️", "🧪", "𝒜", "𝔅", "🏴󠁧󠁢󠁥󠁮󠁧󠁿"]
_SPACES = [" ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n ", "\u00a0", "\u2003", "\u3000", "\u2028", "\x0b", "\x85"]
_ODD = [
    "'s",
    "'S",
    "'LL",
    "'ſ",
    "don't",
    "''",
    "'",
    "3.14159",
    "1234567",
    "½",
    "Ⅷ",
    "²",
    "e\u0301",
    "Å",
    "ﬁ",
    "_",
    "//",
    "#!",
    "{}",
]


@lru_cache(maxsize=1)
def corpus() -> str:
    """At least a megabyte: English prose, Python code, Chinese, Arabic, Hindi, emoji, white space. Always the same."""
    rng = random.Random(20261129)
    prose = "\n\n".join(topics[key] for key in sorted(topics))
    code = "".join(
        (Path(random.__file__).parent / name).read_text(encoding="utf-8")
        for name in ("argparse.py", "ast.py", "datetime.py", "decimal.py", "doctest.py", "inspect.py", "typing.py")
        if (Path(random.__file__).parent / name).is_file()
    )
    parts = []
    for _ in range(12_000):
        kind = rng.randrange(5)
        if kind == 0:
            parts.append("".join(rng.choice(_CHINESE) for _ in range(rng.randint(3, 25))) + rng.choice("，。！？"))
        elif kind == 1:
            parts.append(" ".join(rng.choice(_ARABIC) for _ in range(rng.randint(2, 8))))
        elif kind == 2:
            parts.append(" ".join(rng.choice(_HINDI) for _ in range(rng.randint(2, 8))))
        elif kind == 3:
            parts.append("".join(rng.choice(_EMOJI) for _ in range(rng.randint(1, 5))))
        else:
            parts.append(rng.choice(_ODD))
        parts.append("".join(rng.choice(_SPACES) for _ in range(rng.randint(0, 3))))
    text = "\n".join([prose[:400_000], code[:350_000], "".join(parts)])
    assert len(text.encode()) > 1_000_000
    return text


def documents(n_chars: int = 3000) -> list[str]:
    """The corpus cut without regard to words, so that every kind of beginning and end occurs."""
    text = corpus()
    return [text[i : i + n_chars] for i in range(0, len(text), n_chars)]


def texts(specials: list[str] | None = None, *, assigned_only: bool = False) -> st.SearchStrategy[str]:
    """Strings that reach into every corner: any character, and the pieces where pre-tokenizers differ.

    `assigned_only` leaves out characters that this Python's Unicode does not know (its NFC cannot know them either).
    """
    excluded = ("Cs", "Cn") if assigned_only else ("Cs",)
    anything = st.text(st.characters(exclude_categories=excluded), max_size=8)
    pieces = (
        _SPACES
        + _ODD
        + _EMOJI
        + _ARABIC
        + _HINDI
        + list(_CHINESE[:9])
        + ["a", "b", " the", "The", "!", "?", "▁", "a" * 50]
    )
    return st.lists(st.sampled_from(pieces + (specials or [])) | anything, max_size=12).map("".join)
