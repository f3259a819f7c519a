r"""Rewrite a pre-tokenizer's regular expression for Python's `re`, with every class spelled out from one Unicode table.

``\p{L}`` and ``\s`` become explicit ranges, so the split is the reference's on any Python version, and `re` - the
fastest engine a Python process has - can run it. Explicit ranges are slow only when a set has hundreds of pieces
outside the first 65,536 code points, so each pattern is made in three widths and a text is matched with the narrowest
that holds it:

* ``ascii``: every class clipped to 128 code points;
* ``bmp``: clipped to the Basic Multilingual Plane (a 65,536-entry bit map inside `re`);
* ``full``: the plane's part as above, the rest behind a one-comparison look-ahead.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import lru_cache

from labkit.tokenizer import apart, unicode16
from labkit.tokenizer.unicode16 import Ranges, clip, complement, union

_ESCAPES = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "0": 0x00, "a": 0x07, "e": 0x1B}
_QUANTIFIER = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})[?+]?")
_BEYOND = r"(?=[\U00010000-\U0010FFFF])"
_WIDTH = {"ascii": 0x7F, "bmp": 0xFFFF, "full": unicode16.MAX_CODE_POINT}
MAX_PATTERN_CHARS = 4000
"""The longest published pattern has some 600; a class becomes thousands of characters here."""
CHARS_A_SECOND = 200_000
"""More time for a long text; published patterns read some millions of characters a second."""
_find_beyond = re.compile("[\U00010000-\U0010ffff]").search


class Finder:
    """One pattern, compiled on demand in the width that a text needs.

    ``finder(text)`` is the list of matches. With ``whole=True`` the pieces between matches are kept too, so that the
    result always joins back into the text. A pattern that is not ``known``, nor plain text, may take for ever on some
    text: it is compiled and run in a process that can be ended (``apart``), with a bound for each text.
    """

    def __init__(self, pattern: str, *, whole: bool = False, known: bool = False) -> None:
        if len(pattern) > MAX_PATTERN_CHARS:
            raise ValueError(
                f"a pre-tokenizer pattern has {len(pattern):,} characters; at most {MAX_PATTERN_CHARS:,} are run"
            )
        self.pattern = pattern
        self.whole = whole
        self.known = known or _is_plain(pattern)
        self._by_width: dict[str, Callable[[str], list[str]]] = {}
        self._compile("ascii")  # a malformed pattern must fail when the tokenizer is loaded, not at the first text

    def __call__(self, text: str) -> list[str]:
        width = "ascii" if text.isascii() else "full" if _find_beyond(text) else "bmp"
        find = self._by_width.get(width) or self._compile(width)
        return find(text)

    def _compile(self, width: str) -> Callable[[str], list[str]]:
        compiled: re.Pattern[str] | _Apart = (
            compiled_pattern(self.pattern, width) if self.known else _Apart(self.pattern, width)
        )
        if self.whole:

            def find(text: str) -> list[str]:
                return [piece for piece in _split_around(compiled, text) if piece]
        elif isinstance(compiled, _Apart):

            def find(text: str) -> list[str]:
                return [text[start:stop] for start, stop in compiled.spans(text)]
        elif compiled.groups:

            def find(text: str) -> list[str]:
                return [match.group() for match in compiled.finditer(text)]
        else:
            find = compiled.findall  # type: ignore[assignment]
        self._by_width[width] = find
        return find


class _Apart:
    """A stranger's pattern: the same for whoever uses it, and bounded."""

    def __init__(self, pattern: str, width: str) -> None:
        self._pattern = translate(pattern, width)
        self._what = f"the pre-tokenizer pattern {pattern[:80]!r}"
        try:
            apart.ask({"do": "compile", "pattern": self._pattern}, what=self._what)
        except apart.TooMuch:
            raise
        except ValueError as error:
            raise _not_understood(pattern, error) from error

    def spans(self, text: str) -> list[tuple[int, int]]:
        limit_s = apart.LIMIT_S + len(text) / CHARS_A_SECOND
        places = apart.ask({"do": "spans", "pattern": self._pattern, "text": text}, what=self._what, limit_s=limit_s)
        return list(zip(places[::2], places[1::2], strict=True))


def _is_plain(pattern: str) -> bool:
    """Whether a pattern is text without any operator: escaped characters and letters."""
    return not re.search(r"[.^$*+?{}\[\]\\|()]", re.sub(r"\\[^\w]", "", pattern))


def _split_around(compiled: re.Pattern[str] | _Apart, text: str) -> list[str]:
    spans = compiled.spans(text) if isinstance(compiled, _Apart) else map(re.Match.span, compiled.finditer(text))
    pieces, end = [], 0
    for start, stop in spans:
        pieces += (text[end:start], text[start:stop])
        end = stop
    pieces.append(text[end:])
    return pieces


@lru_cache(maxsize=64)
def compiled_pattern(pattern: str, width: str) -> re.Pattern[str]:
    """`pattern` for texts of one width: "ascii", "bmp" or "full". Raises ValueError for syntax that is not
    understood."""
    try:
        return re.compile(translate(pattern, width))
    except re.error as error:
        raise _not_understood(pattern, error) from error


def _not_understood(pattern: str, error: Exception) -> ValueError:
    return ValueError(
        f"the pre-tokenizer pattern {pattern!r} is not a regular expression that labkit can run exactly: {error}"
    )


def translate(pattern: str, width: str = "full") -> str:
    r"""`pattern`, with ``\p{..}``, ``\s``, ``\d`` and bracket classes written as explicit ranges of Unicode 16.

    >>> translate(r"\s+(?!\S)", "ascii")
    '[\\\t-\\\r\\ ]+(?![\\\x00-\\\x08\\\x0e-\\\x1f\\!-\\\x7f])'
    """
    out: list[str] = []
    i, n = 0, len(pattern)
    while i < n:
        c = pattern[i]
        if c == "[":
            ranges, i = _read_brackets(pattern, i + 1)
        elif c == "\\":
            ranges, i = _read_escape(pattern, i + 1)
        elif c == "$":
            out.append(r"\Z")
            i += 1
            continue
        else:
            if c == "(" and pattern.startswith("(?", i):  # (?: (?= (?! (?<= (?i: are the same in both languages
                stop = re.compile(r"\(\?(?:<?[=!:]|i:|>)").match(pattern, i) or re.compile(r"\(\?:").match(pattern, i)
                if stop is None:
                    raise ValueError(
                        f"the group at {pattern[i : i + 8]!r} in the pre-tokenizer pattern is not understood"
                    )
                out.append(_atomic_or(stop.group()))
                i = stop.end()
                continue
            quantifier = _QUANTIFIER.match(pattern, i)
            if quantifier:
                out.append(_quantifier(quantifier.group(), pattern))
                i = quantifier.end()
            else:
                out.append(c)
                i += 1
            continue
        quantifier = _QUANTIFIER.match(pattern, i)
        text = _quantifier(quantifier.group(), pattern) if quantifier else ""
        i += len(quantifier.group()) if quantifier else 0
        out.append(_emit(ranges, text, width))
    return "".join(out)


def _quantifier(text: str, pattern: str) -> str:
    if len(text) > 1 and text[-1] == "+" and sys.version_info < (3, 11):
        # Possessive quantifiers came with Python 3.11. In the published tokenizer patterns each of them is followed by
        # something that its own class cannot match, so giving back characters could never help: greedy is the same.
        if pattern not in _POSSESSIVE_IS_GREEDY:
            raise ValueError(f"the pattern {pattern!r} uses possessive quantifiers, which need Python 3.11 or newer")
        return text[:-1]
    return text


def _atomic_or(group: str) -> str:
    if group == "(?>" and sys.version_info < (3, 11):
        raise ValueError("the pre-tokenizer pattern has an atomic group, which needs Python 3.11 or newer")
    return group


_POSSESSIVE_IS_GREEDY: set[str] = set()  # filled by labkit.tokenizer.patterns with the patterns where that was checked


def _emit(ranges: Ranges, quantifier: str, width: str) -> str:
    ranges = clip(ranges, 0, _WIDTH[width])
    if not ranges:
        return "(?:(?!))" + quantifier
    low, high = clip(ranges, 0, 0xFFFF), clip(ranges, 0x10000, unicode16.MAX_CODE_POINT)
    if len(high) < 8 or not low:  # a handful of comparisons costs less than a look-ahead
        return _brackets(ranges) + quantifier
    b, a = _brackets(low), _BEYOND + _brackets(high)
    if quantifier == "+":  # each character can be consumed in one way only, so that backtracking stays linear
        return f"(?:{b}+|{a}{b}*)(?:{a}{b}*)*"
    if quantifier == "*":
        return f"{b}*(?:{a}{b}*)*"
    return f"(?:{b}|{a}){quantifier}"


def _brackets(ranges: Ranges) -> str:
    def char(code: int) -> str:
        return "\\" + chr(code) if code < 0x80 and not chr(code).isalnum() else f"\\U{code:08x}"

    return "[" + "".join(char(lo) if lo == hi else f"{char(lo)}-{char(hi)}" for lo, hi in ranges) + "]"


def _read_escape(pattern: str, i: int) -> tuple[Ranges, int]:
    r"""The set that the escape at `i` (just after the backslash) stands for, and the index behind it."""
    if i >= len(pattern):
        raise ValueError(f"the pre-tokenizer pattern {pattern!r} ends in a lone backslash")
    c = pattern[i]
    if c in "pP":
        if pattern[i + 1 : i + 2] == "{":
            stop = pattern.find("}", i)
            if stop < 0:
                raise ValueError(f"\\p{{ without its closing brace in the pre-tokenizer pattern {pattern!r}")
            name, i = pattern[i + 2 : stop], stop + 1
        else:
            name, i = pattern[i + 1 : i + 2], i + 2
        negated = (c == "P") != name.startswith("^")
        found = unicode16.ranges(name.removeprefix("^"))
        return (complement(found) if negated else found), i
    if c in "sS":
        return (unicode16.WHITE_SPACE if c == "s" else complement(unicode16.WHITE_SPACE)), i + 1
    if c in "dD":
        return (unicode16.ranges("Nd") if c == "d" else complement(unicode16.ranges("Nd"))), i + 1
    if c in "uxU":
        digits = re.compile(r"u\{?([0-9A-Fa-f]{1,6})\}?|x\{([0-9A-Fa-f]+)\}|x([0-9A-Fa-f]{2})").match(pattern, i)
        if digits:
            code = int(next(group for group in digits.groups() if group), 16)
            return ((code, code),), digits.end()
    if c.isalnum() and c not in _ESCAPES:
        raise ValueError(
            f"\\{c} in the pre-tokenizer pattern {pattern!r} is not understood; it is refused, not guessed"
        )
    code = _ESCAPES.get(c, ord(c))
    return ((code, code),), i + 1


def _read_brackets(pattern: str, i: int) -> tuple[Ranges, int]:
    """The set of the bracket class whose body starts at `i`, and the index behind its closing bracket."""
    negated = pattern[i : i + 1] == "^"
    i += negated
    sets: list[Ranges] = []
    first = True
    while first or pattern[i : i + 1] != "]":
        first = False
        if i >= len(pattern):
            raise ValueError(f"a [ is not closed in the pre-tokenizer pattern {pattern!r}")
        if pattern.startswith("&&", i):
            raise ValueError(f"set intersection (&&) in the pre-tokenizer pattern {pattern!r} is not supported")
        if pattern[i] == "[":
            one, i = _read_brackets(pattern, i + 1)
        elif pattern[i] == "\\":
            one, i = _read_escape(pattern, i + 1)
        else:
            one, i = ((ord(pattern[i]), ord(pattern[i])),), i + 1
        is_char = len(one) == 1 and one[0][0] == one[0][1]
        if is_char and pattern[i : i + 1] == "-" and pattern[i + 1 : i + 2] not in ("]", ""):
            low, i = one[0][0], i + 1
            if pattern[i] == "\\":
                last, i = _read_escape(pattern, i + 1)
            else:
                last, i = ((ord(pattern[i]), ord(pattern[i])),), i + 1
            one = ((low, last[0][0]),)
        sets.append(one)
    found = union(*sets)
    return (complement(found) if negated else found), i + 1
