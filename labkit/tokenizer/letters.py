"""Letters as the reference's Unicode tables know them: lower case of version 17, normal forms of version 9.

`tokenizers` brings its own tables, so its ids do not change with a Python. Here Python's tables do the work, and what
they know differently is kept apart: letters that got a lower case after Python's own version are listed, and a
character that came after Unicode 9 with a decomposition or a combining class is passed as the reference passes it,
untouched and joined to nothing.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

_ONE_BY_ONE = {0xA7CB: 0x0264, 0xA7DC: 0x019B, 0x2C2F: 0x2C5F}
_NEXT = (0x1C89, 0xA7C0, 0xA7CC, 0xA7CE, 0xA7D0, 0xA7D2, 0xA7D4, 0xA7D6, 0xA7D8, 0xA7DA)  # the small letter follows
_BLOCKS = ((0x10D50, 0x10D65, 0x20), (0x16EA0, 0x16EB8, 0x1B))  # first, last, distance
_VITHKUQI = (range(0x10570, 0x1057B), range(0x1057C, 0x1058B), range(0x1058C, 0x10593), range(0x10594, 0x10596))

_LOWER: dict[int, int] = {
    **_ONE_BY_ONE,
    **{code: code + 1 for code in _NEXT},
    **{code: code + far for first, last, far in _BLOCKS for code in range(first, last + 1)},
    **{code: code + 0x27 for part in _VITHKUQI for code in part},
}
"""Lower case of letters that came after Unicode 13, the version of the oldest Python that runs labkit."""

# Characters after Unicode 9 that have a combining class or a decomposition, and first parts of new compositions.
_NEWER = re.compile(
    "["
    "\u0558\u058b-\u058c\u05c8-\u05c9\u07fd\u0897-\u089f\u08ca-\u08d3\u09fe\u0c3c\u0d3b-\u0d3c\u0eba\u1715\u1abf-\u1af0"
    "\u1df6-\u1dfa\u209d-\u209f\u32ff\ua7f1-\ua7f4\ua82c\uab69"
    "\U000105c9\U000105d2\U000105da\U000105e4\U00010781-\U00010785\U00010787-\U000107b0\U000107b2-\U000107bf"
    "\U00010d24-\U00010d27\U00010d69-\U00010d6d\U00010eab-\U00010eac\U00010ecb-\U00010ecf\U00010ef0-\U00010efb"
    "\U00010efd-\U00010eff\U00010f46-\U00010f50\U00010f82-\U00010f85\U00011070\U0001133b\U00011382-\U00011385"
    "\U0001138b\U0001138e\U00011390-\U00011391\U000113c2\U000113c5\U000113c7-\U000113c8\U000113ce-\U000113d0"
    "\U0001145e\U00011839-\U0001183a\U00011935\U00011938\U0001193d-\U0001193e\U00011943\U000119e0\U00011a34\U00011a47"
    "\U00011a99\U00011d42\U00011d44-\U00011d45\U00011d97\U00011f41-\U00011f42\U0001611e\U00016121-\U00016129"
    "\U0001612f\U00016d63\U00016d67-\U00016d6a\U00016ff0-\U00016ff1\U0001b123-\U0001b126\U0001ccd6-\U0001ccf9"
    "\U0001d127-\U0001d128\U0001d250-\U0001d252\U0001d25b-\U0001d25c\U0001d25f\U0001d280-\U0001d281\U0001d6a6"
    "\U0001df95\U0001dfcd-\U0001dfff\U0001e030-\U0001e06d\U0001e08f\U0001e130-\U0001e136\U0001e2ae"
    "\U0001e2ec-\U0001e2ef\U0001e4ec-\U0001e4ef\U0001e5ee-\U0001e5ef\U0001e6e3\U0001e6e6\U0001e6ee-\U0001e6ef\U0001e6f5"
    "\U0001f16c\U0001fbf0-\U0001fbf9"
    "]"
)


def lower(text: str) -> str:
    """Each letter's lower case by itself: a capital sigma at a word's end is a plain small one, as in the reference.

    >>> lower("ΟΔΟΣ"), "ΟΔΟΣ".lower()
    ('οδοσ', 'οδος')
    """
    if text.isascii():
        return text.lower()
    # translate first: it leaves what it does not know, and str.lower leaves what it made
    return "".join([char.lower() for char in text.translate(_LOWER)])


def normal_form(form: Any, text: str) -> str:
    """NFC, NFD, NFKC or NFKD as of Unicode 9."""
    if text.isascii():
        return text
    if not _NEWER.search(text):
        return unicodedata.normalize(form, text)
    parts, end = [], 0
    for match in _NEWER.finditer(text):
        parts += (unicodedata.normalize(form, text[end : match.start()]), match.group())
        end = match.end()
    return "".join([*parts, unicodedata.normalize(form, text[end:])])
