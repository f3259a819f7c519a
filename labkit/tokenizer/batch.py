"""Long texts and batches: cut into safe pieces, encoded by the compiled kernels when they are ready, else in Python.

A text may be cut behind a line end that stands between two characters that are not white space: each pattern family of
:mod:`labkit.tokenizer.rules` ends a word there whatever surrounds it, and decides it without looking further.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from labkit.tokenizer import native
from labkit.tokenizer.rules import rule_of

if TYPE_CHECKING:
    from labkit.tokenizer.tokenizer import Tokenizer

LONG_CHARS = 1 << 14  # a longer text is worth the compiled path's fixed cost
_CHUNK_CHARS = 1 << 18  # what one step of the Python path holds as words at a time
_GROUP_CHARS = 1 << 24  # what one step of the compiled path holds as bytes and ids at a time
_find_cut = re.compile(r"(?<=\S)\n(?=\S)").search


def warm_up(tokenizer: Tokenizer) -> str | None:
    """See :meth:`labkit.tokenizer.Tokenizer.warm_up`."""
    if not native.NativeEncoder.supports(tokenizer):
        return "the compiled encoder does not cover this tokenizer's pre-tokenizer or model"
    if native.kernels(wait=True) is None:
        return native.why_not()
    _tables(tokenizer)
    return None


def encode_long(tokenizer: Tokenizer, piece: str, at_start: bool) -> list[int]:
    """The ids of one long piece of plain text."""
    kernels = _ready(tokenizer, len(piece))
    if kernels is None:
        return encode_in_python(tokenizer, piece, at_start)
    workers = _tables(tokenizer).n_workers
    ids: list[int] = []
    for part in chunks(piece, _GROUP_CHARS):
        for row in _encode_plain(tokenizer, kernels, list(chunks(part, max(LONG_CHARS, len(part) // workers + 1)))):
            ids += row
    return ids


def encode_lists(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text."""
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"encode_batch() takes a list of str, and found a {type(text).__name__} in it")
    kernels = _ready(tokenizer, sum(map(len, texts)))
    if kernels is None:
        return [tokenizer.encode(text) for text in texts]
    results: list[list[int]] = []
    group: list[str] = []
    n_chars = 0
    for text in texts:
        group.append(text)
        n_chars += len(text)
        if n_chars > _GROUP_CHARS:
            results += _encode_group(tokenizer, kernels, group)
            group, n_chars = [], 0
    return results + (_encode_group(tokenizer, kernels, group) if group else [])


def chunks(text: str, n_chars: int, find_cut: Any = _find_cut) -> Iterator[str]:
    """The text in pieces of about `n_chars` characters, cut where any pattern family ends a word."""
    start = 0
    while len(text) - start > n_chars:
        cut = find_cut(text, start + n_chars)
        if cut is None:
            break
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def encode_in_python(tokenizer: Tokenizer, piece: str, at_start: bool) -> list[int]:
    """The ids of one piece of plain text without the compiled kernels, holding one chunk of it as words at a time."""
    ids: list[int] = []
    lookup = tokenizer._words.__getitem__
    find_cut = _find_cut if rule_of(tokenizer.pretokenize) else getattr(tokenizer.pretokenize, "find_cut", None)
    parts = chunks(piece, _CHUNK_CHARS, find_cut) if find_cut else (piece,)
    for part in parts:
        ids += chain.from_iterable(map(lookup, tokenizer.pretokenize(part, at_start)))
        at_start = False
    return ids


def _ready(tokenizer: Tokenizer, n_chars: int) -> Any:
    """The compiled kernels when they can serve this tokenizer now; a large call has them compiled for the next one."""
    if n_chars < native.WORTH_CALLING_BYTES or not native.NativeEncoder.supports(tokenizer):
        return None
    return native.kernels(start=n_chars >= native.WORTH_COMPILING_BYTES, wait=n_chars >= native.WORTH_WAITING_BYTES)


def _tables(tokenizer: Tokenizer) -> native.NativeEncoder:
    if tokenizer._native is None:
        tokenizer._native = native.NativeEncoder(tokenizer)
    return tokenizer._native


def _encode_group(tokenizer: Tokenizer, kernels: Any, texts: Sequence[str]) -> list[list[int]]:
    split = tokenizer._added.split
    plain: list[str] = []
    plans: list[list[str | int]] = []  # for each text, what it consists of
    for text in texts:
        pieces = split(text)
        plans.append(pieces)
        plain += [piece for piece in pieces if isinstance(piece, str)]
    encoded = iter(_encode_plain(tokenizer, kernels, plain))
    results: list[list[int]] = []
    for pieces in plans:
        if len(pieces) == 1 and isinstance(pieces[0], str):
            results.append(next(encoded))
        else:
            results.append([i for piece in pieces for i in ((piece,) if isinstance(piece, int) else next(encoded))])
    if tokenizer._words.lost:
        tokenizer._words.report()
    return results


def _encode_plain(tokenizer: Tokenizer, kernels: Any, pieces: Sequence[str]) -> list[list[int]]:
    if not pieces:
        return []
    results: list[list[int]] = []
    try:
        data = [piece.encode() for piece in pieces]
    except UnicodeEncodeError as error:
        from labkit.tokenizer.words import surrogate_error

        raise surrogate_error(str(error.object)) from error
    for ids, ends in _tables(tokenizer).encode(kernels, data):
        flat: list[int] = ids.tolist()
        start = 0
        for end in ends.tolist():
            if end < 0:  # it needs a byte that has no token: the Python path knows what to do and to say
                results.append(encode_in_python(tokenizer, pieces[len(results)], True))
            else:
                results.append(flat[start:end])
                start = end
    return results
