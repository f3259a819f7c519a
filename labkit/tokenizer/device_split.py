"""Splitting on the device: where words begin, decided for all characters of many texts at once.

The pattern families of :mod:`labkit.tokenizer.rules` look local through a regex and are local in fact: whether a word
begins at a character depends on its class, on the maximal runs of equal class around it, and on one character beyond
these. So every answer is a handful of tensor operations (comparisons, prefix maxima), in time linear in the text, with
no automaton to step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.tokenizer.rules import BLANK, LETTER, NEWLINE, NUMBER, OTHER, SPACE, Rule

_TEXT_END = 7  # stands for the class of what is beyond a text
_QUOTE, _LONG_S = 0x27, 0x17F


@dataclass(frozen=True)
class _Runs:
    """Maximal runs of one kind within a text; all tensors are int64 of shape (n_runs,)."""

    start: Tensor
    stop: Tensor
    kind: Tensor
    before: Tensor  # class of the character in front, _TEXT_END at a text's start
    behind: Tensor


def word_starts(data: Tensor, text_starts: Tensor, classes: Tensor, rule: Rule) -> Tensor:
    """Byte index at which each word begins, int64 of shape (n_words,), ascending.

    data: uint8 (n_bytes,), the UTF-8 of all texts one behind the other; text_starts: int64 (n_texts,), the byte at
    which each (non-empty) text begins; classes: uint8 (0x110000,), see :func:`labkit.tokenizer.rules.class_table`.
    """
    char_at = torch.nonzero((data & 0xC0) != 0x80).squeeze(1)  # (n_chars,) byte index of each character
    codes = _code_points(data, char_at)
    kinds = classes[codes].long()
    n = len(kinds)
    text_begins = torch.zeros(n + 1, dtype=torch.bool, device=data.device)
    text_begins[torch.searchsorted(char_at, text_starts)] = True
    text_begins[n] = True

    runs = _find_runs(kinds, text_begins)
    starts = torch.zeros(n + 1, dtype=torch.bool, device=data.device)
    _cut_numbers(starts, runs, kinds, rule)
    joined_others = _cut_others(starts, runs, kinds)
    suffix_at, suffix_stop = _suffixes(codes, kinds, runs, joined_others, text_begins, rule)
    _cut_letters(starts, runs, joined_others, suffix_at, rule)
    _cut_space(starts, runs, kinds, rule)
    starts[suffix_stop] = True
    return char_at[torch.nonzero(starts[:n]).squeeze(1)]


def _code_points(data: Tensor, char_at: Tensor) -> Tensor:
    """UTF-8 decoded, int64 (n_chars,)."""
    last = len(data) - 1
    lead = data[char_at].long()

    def tail(k: int) -> Tensor:
        return (data[(char_at + k).clamp(max=last)] & 0x3F).long()

    two = (lead & 0x1F) << 6 | tail(1)
    three = (lead & 0x0F) << 12 | tail(1) << 6 | tail(2)
    four = (lead & 0x07) << 18 | tail(1) << 12 | tail(2) << 6 | tail(3)
    return torch.where(lead < 0x80, lead, torch.where(lead < 0xE0, two, torch.where(lead < 0xF0, three, four)))


def _find_runs(kinds: Tensor, text_begins: Tensor) -> _Runs:
    n = len(kinds)
    group = kinds.clamp(max=SPACE)  # the three kinds of white space run together
    begins = text_begins.clone()
    begins[1:n] |= group[1:] != group[:-1]
    start = torch.nonzero(begins[:n]).squeeze(1)
    stop = torch.cat([start[1:], start.new_tensor([n])])
    before = torch.where(text_begins[start], _TEXT_END, kinds[(start - 1).clamp(min=0)])
    behind = torch.where(text_begins[stop], _TEXT_END, kinds[stop.clamp(max=n - 1)])
    return _Runs(start, stop, group[start], before, behind)


def _cut_numbers(starts: Tensor, runs: _Runs, kinds: Tensor, rule: Rule) -> None:
    is_number = runs.kind == NUMBER
    if rule.max_numbers == 0:  # GPT-2: a space joins
        starts[runs.start[is_number & (runs.before != BLANK)]] = True
        return
    run_of = torch.cumsum(_flags(runs.start, len(kinds)), 0) - 1
    at = torch.nonzero(kinds == NUMBER).squeeze(1)
    starts[at[(at - runs.start[run_of[at]]) % rule.max_numbers == 0]] = True


def _cut_others(starts: Tensor, runs: _Runs, kinds: Tensor) -> Tensor:
    """Punctuation and the like; returns, for each run, whether it is such a run that a space joins."""
    is_other = runs.kind == OTHER
    joined = is_other & (runs.before == BLANK)
    starts[runs.start[is_other & ~joined]] = True
    return joined


def _suffixes(
    codes: Tensor, kinds: Tensor, runs: _Runs, joined: Tensor, text_begins: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """For each English suffix ('s 't 're 've 'm 'll 'd): the index of its first letter, and the index behind it."""
    n = len(codes)
    quotes = runs.start[(runs.kind == OTHER) & ~joined & (codes[runs.start] == _QUOTE) & (runs.behind == LETTER)]
    quotes = quotes[kinds[(quotes + 1).clamp(max=n - 1)] == LETTER]  # the run is the quote alone
    a = codes[quotes + 1]
    second = (quotes + 2).clamp(max=n - 1)
    b = torch.where(text_begins[(quotes + 2).clamp(max=n)], 0, codes[second])
    if rule.any_prefix:
        a = torch.where((a >= 0x41) & (a <= 0x5A), a | 0x20, torch.where(a == _LONG_S, ord("s"), a))
        b = torch.where((b >= 0x41) & (b <= 0x5A), b | 0x20, b)
    one = (a == ord("s")) | (a == ord("t")) | (a == ord("m")) | (a == ord("d"))
    two = (((a == ord("r")) | (a == ord("v"))) & (b == ord("e"))) | ((a == ord("l")) & (b == ord("l")))
    found = one | two
    first = quotes[found] + 1
    return first, first + torch.where(one[found], 1, 2)


def _cut_letters(starts: Tensor, runs: _Runs, joined_others: Tensor, suffix_at: Tensor, rule: Rule) -> None:
    is_letter = runs.kind == LETTER
    if rule.any_prefix:
        after_space = (runs.before == SPACE) | (runs.before == BLANK)
        single = (runs.kind == OTHER) & (runs.stop - runs.start == 1) & ~joined_others
        after_single = torch.zeros_like(single)
        after_single[1:] = single[:-1]
        joined = after_space | (after_single & (runs.before == OTHER))
    else:
        joined = runs.before == BLANK
    starts[runs.start[is_letter & ~joined]] = True
    starts[suffix_at] = False


def _cut_space(starts: Tensor, runs: _Runs, kinds: Tensor, rule: Rule) -> None:
    is_space = runs.kind == SPACE
    start, stop = runs.start[is_space], runs.stop[is_space]
    before, behind = runs.before[is_space], runs.behind[is_space]
    at_end = behind == _TEXT_END
    if rule.numbers_end_text:
        at_end = at_end | (behind == NUMBER)
    if rule.any_prefix:
        index = torch.arange(len(kinds), device=kinds.device)
        newline = kinds == NEWLINE
        # Line ends right behind punctuation belong to it.
        next_other = torch.flip(torch.cummin(torch.flip(torch.where(newline, len(kinds), index), [0]), 0).values, [0])
        start = torch.where(before == OTHER, torch.minimum(next_other[start], stop), start)
        left = start < stop
        start, stop, at_end = start[left], stop[left], at_end[left]
        starts[start] = True
        # White space up to the last line end in the run is a word; what is behind it goes on below.
        last_newline = torch.cummax(torch.where(newline, index, -1), 0).values[stop - 1]
        rest = torch.where(last_newline >= start, last_newline + 1, start)
        if rule.whole_tail:
            rest = torch.where(at_end, start, rest)
        left = rest < stop
        start, stop, at_end = rest[left], stop[left], at_end[left]
    starts[start] = True
    starts[stop[~at_end] - 1] = True  # the last one joins what follows, or is a word of its own


def _flags(at: Tensor, n: int) -> Tensor:
    flags = torch.zeros(n, dtype=torch.int64, device=at.device)
    flags[at] = 1
    return flags
