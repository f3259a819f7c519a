"""Exact batched encoding as tensor operations, on a GPU or a CPU: split, unique words, merge rounds, scatter back.

The GPU tokenizers described so far (BlockBPE, arXiv 2507.11941; GPUTOK, arXiv 2603.02597) leave out the
pre-tokenization pattern, and so change the ids. This one keeps it and is exact:

1. the UTF-8 of all texts goes to the device once; :mod:`~labkit.tokenizer.device_split` finds where words begin;
2. :mod:`~labkit.tokenizer.device_words` keeps one of each word (natural text repeats: a megabyte has some 10,000);
3. these are merged in rows of equal width by :mod:`~labkit.tokenizer.device_merge`, or by the Triton kernel on a GPU;
4. each word of the text takes the ids of its kind.

Words longer than 64 bytes, one in some ten thousand, are merged on the CPU, where a queue is linear in all but a
logarithm.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labkit.tokenizer import device_merge, merge_table
from labkit.tokenizer.byte_level import BYTE_OF
from labkit.tokenizer.device_merge import DeviceTable
from labkit.tokenizer.device_split import word_starts
from labkit.tokenizer.device_words import hash_words, same_bytes, unique_words
from labkit.tokenizer.rules import class_table, rule_of
from labkit.tokenizer.words import ByteWords

if TYPE_CHECKING:
    from labkit.tokenizer.tokenizer import Tokenizer

WIDTHS = (4, 8, 16, 32, 64)  # words are merged in rows of these many bytes
GROUP_BYTES = {"cpu": 1 << 22, "cuda": 1 << 26}  # bytes on the device at a time: some 100 B of tensors for each

MergeRows = Callable[[Tensor, Tensor, DeviceTable], tuple[Tensor, Tensor]]


def why_not(tokenizer: Tokenizer) -> str | None:
    """Why this tokenizer cannot be batched on a device; None when it can."""
    words = tokenizer._words
    if not isinstance(words, ByteWords) or words.unknown is not None:
        return "its vocabulary is not byte-level"
    if rule_of(tokenizer.pretokenize) is None:
        return "its splitting pattern belongs to neither the GPT-2 nor the Llama-3 family"
    return None


def encode_tensors(tokenizer: Tokenizer, texts: Sequence[str], device: str | torch.device) -> list[Tensor]:
    """The ids of each text as an int32 tensor on `device`; see :meth:`labkit.tokenizer.Tokenizer.encode_batch`.

    A tokenizer that cannot be batched is run text by text on the CPU, with the same result.
    """
    device = torch.device(device)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"encode_batch() takes a list of str, and found a {type(text).__name__} in it")
    if why_not(tokenizer) is not None:
        return [torch.tensor(ids, dtype=torch.int32, device=device) for ids in tokenizer.encode_batch(texts)]
    if tokenizer._batched is None or tokenizer._batched.device != device:
        tokenizer._batched = DeviceEncoder(tokenizer, device)
    return tokenizer._batched.encode(texts)


class DeviceEncoder:
    """One tokenizer's tables on one device."""

    def __init__(self, tokenizer: Tokenizer, device: torch.device, merge_rows: MergeRows | None = None) -> None:
        words, rule = tokenizer._words, rule_of(tokenizer.pretokenize)
        assert isinstance(words, ByteWords)
        assert rule is not None
        self.device = device
        self.rule = rule
        self.table = DeviceTable.build(merge_table.build(words), device)
        self.classes = torch.from_numpy(class_table(rule).copy()).to(device)
        self._tokenizer = tokenizer
        self._words = words
        self.merge_rows = merge_rows or self._fastest_merge_rows()
        self._absent = tokenizer.unencodable_bytes
        self._whole = _WholeWords(words, device) if words.ignore_merges else None
        self._group_bytes = GROUP_BYTES.get(device.type, GROUP_BYTES["cpu"])

    def _fastest_merge_rows(self) -> MergeRows:
        """The Triton kernel on a GPU once it has proved itself on this tokenizer's own tokens, else the rounds."""
        kernel = triton_merge_rows() if self.device.type == "cuda" else None
        if kernel is None:
            return device_merge.merge_rows
        width = 16
        words = [token for token in self._words.vocab if len(token) <= width][-256:]
        rows = torch.full((len(words), width), -1, dtype=torch.int32)
        for row, word in enumerate(words):
            rows[row, : len(word)] = torch.tensor([BYTE_OF.get(symbol, 0) for symbol in word])
        rows = torch.where(rows >= 0, self.table.byte_ids.cpu()[rows.clamp(min=0).long()], -1).to(self.device)
        lengths = torch.tensor([len(word) for word in words], device=self.device)
        try:
            fast, plain = (merge(rows, lengths, self.table) for merge in (kernel, device_merge.merge_rows))
            proved = all(torch.equal(a, b) for a, b in zip(fast, plain, strict=True))
        except Exception as error:  # noqa: BLE001 - whatever fails in a compiler or driver, the rounds still work
            proved = False
            warnings.warn(f"the Triton merge kernel does not run here: {error}. Slower rounds serve.", stacklevel=2)
        return kernel if proved else device_merge.merge_rows

    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        results: list[Tensor] = []
        group: list[list[bytes | int]] = []
        n_bytes = 0
        for text in texts:
            try:
                pieces: list[bytes | int] = [
                    piece if isinstance(piece, int) else piece.encode() for piece in self._tokenizer._added.split(text)
                ]
            except UnicodeEncodeError as error:
                from labkit.tokenizer.words import surrogate_error

                raise surrogate_error(text) from error
            group.append(pieces)
            n_bytes += sum(len(piece) for piece in pieces if isinstance(piece, bytes))
            if n_bytes >= self._group_bytes:
                results += self._encode_group(group)
                group, n_bytes = [], 0
        results += self._encode_group(group)
        self._words.report()
        return results

    def _encode_group(self, group: Sequence[Sequence[bytes | int]]) -> list[Tensor]:
        plain = [piece for pieces in group for piece in pieces if isinstance(piece, bytes)]
        # The few pieces with a byte that has no token go the Python way, which has a policy for them.
        usual = [i for i, piece in enumerate(plain) if len(piece.translate(None, self._absent)) == len(piece)]
        encoded: list[Tensor | None] = [None] * len(plain)
        for i, ids in zip(usual, self._encode_plain([plain[i] for i in usual]), strict=True):
            encoded[i] = ids
        results, at = [], 0
        for pieces in group:
            parts: list[Tensor] = []
            for piece in pieces:
                if isinstance(piece, int):
                    parts.append(self._tensor([piece]))
                    continue
                ids = encoded[at]
                parts.append(self._tensor(self._in_python(piece)) if ids is None else ids)
                at += 1
            results.append(parts[0] if len(parts) == 1 else torch.cat(parts) if parts else self._tensor([]))
        return results

    def _in_python(self, piece: bytes) -> list[int]:
        lookup = self._words.__getitem__
        return [i for word in self._tokenizer.pretokenize(piece.decode(), True) for i in lookup(word)]

    def _encode_plain(self, pieces: Sequence[bytes]) -> Sequence[Tensor]:
        if not pieces:
            return []
        data = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8).to(self.device)
        sizes = torch.tensor([len(piece) for piece in pieces])
        ends = torch.cumsum(sizes, 0)
        begins = (ends - sizes).to(self.device)
        starts = word_starts(data, begins, self.classes, self.rule)
        stops = torch.cat([starts[1:], starts.new_tensor([len(data)])])
        kinds_first, kind = unique_words(data, starts, stops)
        ids, counts = self._encode_unique(data, starts[kinds_first], stops[kinds_first])
        flat, word_ends = _spread(ids, counts, kind)
        words_before = torch.searchsorted(starts, ends.to(self.device))  # words that begin before each piece's end
        return torch.tensor_split(flat, word_ends[words_before - 1].cpu()[:-1])

    def _encode_unique(self, data: Tensor, starts: Tensor, stops: Tensor) -> tuple[Tensor, Tensor]:
        """(the ids of all words, one behind the other; how many each word has)."""
        n_words = len(starts)
        lengths = stops - starts
        counts = torch.zeros(n_words, dtype=torch.int64, device=self.device)
        open_ = torch.ones(n_words, dtype=torch.bool, device=self.device)
        found: list[tuple[Tensor, Tensor]] = []  # (ids in order, words in order): ids of one word stay together
        if self._whole is not None:
            ids = self._whole.look_up(data, starts, stops)
            known = torch.nonzero(ids >= 0).squeeze(1)
            counts[known] = 1
            open_[known] = False
            found.append((ids[known].to(torch.int32), known))
        narrowest = 0
        for width in WIDTHS:
            words = torch.nonzero(open_ & (lengths > narrowest) & (lengths <= width)).squeeze(1)
            narrowest = width
            if not len(words):
                continue
            columns = torch.arange(width, device=self.device)
            at = (starts[words][:, None] + columns).clamp(max=len(data) - 1)
            rows = self.table.byte_ids[data[at].long()].masked_fill_(columns >= lengths[words][:, None], -1)
            rows, left = self.merge_rows(rows, lengths[words], self.table)
            counts[words] = left
            found.append((rows[columns < left[:, None]], torch.repeat_interleave(words, left)))
        for word in torch.nonzero(open_ & (lengths > WIDTHS[-1])).squeeze(1).tolist():
            text = bytes(data[starts[word] : stops[word]].cpu().numpy()).decode()
            ids = self._tensor(self._words[text])
            counts[word] = len(ids)
            found.append((ids, torch.full((len(ids),), word, dtype=torch.int64, device=self.device)))
        ids, owner = torch.cat([part[0] for part in found]), torch.cat([part[1] for part in found])
        return ids[torch.argsort(owner, stable=True)], counts

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int32, device=self.device)


class _WholeWords:
    """The vocabulary as whole words, for tokenizers that take a word that is a token without merging it."""

    def __init__(self, words: ByteWords, device: torch.device) -> None:
        from labkit.tokenizer.byte_level import from_symbols

        spelled = [from_symbols(token) for token in words.vocab]
        self._data = torch.frombuffer(bytearray(b"".join(spelled)), dtype=torch.uint8).to(device)
        sizes = torch.tensor([len(token) for token in spelled], device=device)
        stops = torch.cumsum(sizes, 0)
        hashes = hash_words(self._data, stops - sizes, stops)
        order = torch.argsort(hashes)
        self._hashes, self._stops, self._sizes = hashes[order], stops[order], sizes[order]
        self._ids = torch.tensor(list(words.vocab.values()), dtype=torch.int64, device=device)[order]

    def look_up(self, data: Tensor, starts: Tensor, stops: Tensor) -> Tensor:
        """The id of each word that is a token, else -1."""
        hashes = hash_words(data, starts, stops)
        at = torch.searchsorted(self._hashes, hashes).clamp(max=len(self._hashes) - 1)
        stop = self._stops[at]
        same = (self._hashes[at] == hashes) & same_bytes(data, starts, stops, self._data, stop - self._sizes[at], stop)
        return torch.where(same, self._ids[at], -1)


def _spread(ids: Tensor, counts: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
    """The ids of every word of the text, from those of its kind: (ids in order, the index behind each word)."""
    first = torch.cumsum(counts, 0) - counts
    n = counts[kind]
    ends = torch.cumsum(n, 0)
    shift = torch.repeat_interleave(first[kind] - (ends - n), n)
    return ids[shift + torch.arange(len(shift), device=ids.device)], ends


@lru_cache(maxsize=1)
def triton_merge_rows() -> Any:
    """The Triton version of merge_rows, or None where Triton is not installed or does not work."""
    try:
        from labkit.tokenizer.triton_merge import merge_rows
    except (ImportError, RuntimeError):
        return None
    return merge_rows
