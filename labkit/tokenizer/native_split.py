"""The compiled scanner: where a word ends, from the UTF-8 bytes. Importing this module needs numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from labkit.tokenizer.rules import BLANK, LETTER, NEWLINE, NUMBER, OTHER

_QUOTE = 0x27
_options: dict[str, Any] = {"nogil": True, "cache": True}


@njit(inline="always", **_options)
def _char(data, i):
    """(code point, length in bytes) of the UTF-8 character at `i`."""
    b = np.int64(data[i])
    if b < 0x80:
        return b, 1
    if b < 0xE0:
        return (b & 0x1F) << 6 | (data[i + 1] & 0x3F), 2
    if b < 0xF0:
        return (b & 0x0F) << 12 | (data[i + 1] & 0x3F) << 6 | (data[i + 2] & 0x3F), 3
    return (b & 0x07) << 18 | (data[i + 1] & 0x3F) << 12 | (data[i + 2] & 0x3F) << 6 | (data[i + 3] & 0x3F), 4


@njit(**_options)
def _run(data, i, end, classes, wanted):
    """Index behind the run of characters of one class that starts at `i`."""
    while i < end:
        code, length = _char(data, i)
        if classes[code] != wanted:
            break
        i += length
    return i


@njit(**_options)
def _suffix(data, i, end, any_case):
    """Index behind an English suffix ('s 't 're 've 'm 'll 'd) at the quote `i`, or `i` when there is none."""
    if i + 1 >= end:
        return i
    a = data[i + 1]
    if any_case:
        if a == 0xC5 and i + 2 < end and data[i + 2] == 0xBF:  # U+017F, which folds to "s"
            return i + 3
        if 0x41 <= a <= 0x5A:
            a |= 0x20
    if a == 0x73 or a == 0x74 or a == 0x6D or a == 0x64:  # s t m d
        return i + 2
    if i + 2 < end:
        b = data[i + 2]
        if any_case and 0x41 <= b <= 0x5A:
            b |= 0x20
        if (a == 0x72 or a == 0x76) and b == 0x65:  # re ve
            return i + 3
        if a == 0x6C and b == 0x6C:  # ll
            return i + 3
    return i


@njit(**_options)
def word_end(data, i, end, classes, rule):
    """Index behind the word that starts at `i` of a text that ends at `end` (see rules.Rule)."""
    any_prefix, max_numbers, numbers_end_text, whole_tail = rule[0], rule[1], rule[2], rule[3]
    code, length = _char(data, i)
    kind = classes[code]
    if code == _QUOTE:
        behind = _suffix(data, i, end, any_prefix)
        if behind > i:
            return behind
    if kind == LETTER:
        return _run(data, i, end, classes, LETTER)
    j = i + length
    if kind == NUMBER:
        taken = 1
        while j < end and (max_numbers == 0 or taken < max_numbers):
            code, length = _char(data, j)
            if classes[code] != NUMBER:
                break
            j += length
            taken += 1
        return j
    following = -1
    if j < end:
        code, _ = _char(data, j)
        following = np.int64(classes[code])
    if following == LETTER and (kind == BLANK or (any_prefix and kind != NEWLINE)):
        return _run(data, j, end, classes, LETTER)
    if kind == OTHER or (kind == BLANK and following == OTHER):
        j = _run(data, j, end, classes, OTHER)
        if any_prefix:
            j = _run(data, j, end, classes, NEWLINE)
        return j
    if kind == BLANK and following == NUMBER and not any_prefix and not numbers_end_text:
        return _run(data, j, end, classes, NUMBER)
    # White space: `last` is where the last one of the run starts, `line` the index behind the last line end in it.
    last, line, j = i, np.int64(-1), i
    following = -1
    while j < end:
        code, length = _char(data, j)
        following = np.int64(classes[code])
        if following < 3:
            break
        last = j
        j += length
        if following == NEWLINE:
            line = j
    at_end = j == end
    if at_end and whole_tail:
        return j
    if any_prefix and line > 0:
        return line
    if at_end or last == i or (numbers_end_text and following == NUMBER):
        return j
    return last
