"""SentencePiece-style BPE: characters instead of bytes, "▁" for a space, and bytes only for what has no token.

Llama-2, TinyLlama and the early Mistral models use it. There is no regular expression: the whole text is one word. But
no token of such a vocabulary has a "▁" behind another character, so no merge can join across that place, and cutting
there gives the same ids in small, cacheable words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from labkit.tokenizer.added import AddedToken, AddedTokens
from labkit.tokenizer.codec import TokenBytes
from labkit.tokenizer.merging import REAL_SPACE, JoinedRanks
from labkit.tokenizer.stream import BytesByCharacter, StreamDecoder
from labkit.tokenizer.tokenizer import Tokenizer
from labkit.tokenizer.words import WordEncoder

SPACE = "▁"  # U+2581
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_NORMAL, _UNKNOWN, _BYTE = 1, 2, 6
_find_cut = re.compile(f"(?<=[^ {SPACE}])(?=[ {SPACE}])").search


class PieceWords(WordEncoder):
    """Spells a word in characters; a character without a token in its UTF-8 bytes ``<0xNN>``, or as the unknown
    token."""

    def __init__(
        self,
        vocab: Mapping[str, int],
        ranks: Mapping[str, int],
        *,
        byte_fallback: bool = True,
        unknown: str | None = None,
        fuse_unknown: bool = True,
        ignore_merges: bool = False,
    ) -> None:
        self.has_spaces = any(" " in token for token in vocab)
        if self.has_spaces:
            vocab = {token.replace(" ", REAL_SPACE): i for token, i in vocab.items()}
        super().__init__(vocab, ranks, ignore_merges=ignore_merges)
        self.unknown = unknown.replace(" ", REAL_SPACE) if unknown and self.has_spaces else unknown
        self.fuse_unknown = fuse_unknown
        self.byte_tokens = {byte: f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" in vocab}
        if not byte_fallback:
            self.byte_tokens = {}

    def spell(self, word: str) -> tuple[str | list[str], bool]:
        vocab = self.vocab
        symbols: list[str] = []
        complete, after_unknown = True, False
        for char in word.replace(" ", REAL_SPACE) if self.has_spaces else word:
            was_unknown, after_unknown = after_unknown, False
            if char in vocab:
                symbols.append(char)
                continue
            data = b" " if char == REAL_SPACE else char.encode()
            if all(byte in self.byte_tokens for byte in data):
                symbols += [self.byte_tokens[byte] for byte in data]
            elif self.unknown is not None:
                after_unknown = True
                if not (self.fuse_unknown and was_unknown):
                    symbols.append(self.unknown)
            else:
                complete = False
                self.lost[char] += 1
        return symbols, complete


class PieceSplit:
    """Spaces to "▁", perhaps one in front, and the safe cuts.

    `prepend` is "never", "first" (only at the start of a text) or "always" (after each added token too). `cut` is None
    for no cut, "safe" for cuts between a character and a "▁", "each" for a cut before every "▁" (a Metaspace step that
    splits).
    """

    def __init__(self, *, prepend: str = "never", cut: str | None = "safe", replace_spaces: bool = True) -> None:
        if prepend not in ("never", "first", "always"):
            raise ValueError(f"prepend_scheme must be never, first or always, not {prepend!r}")
        self.prepend, self.replace_spaces = prepend, replace_spaces
        pattern = {"safe": f"{SPACE}*[^{SPACE}]+|{SPACE}+", "each": f"{SPACE}[^{SPACE}]*|[^{SPACE}]+"}.get(cut or "")
        self._find = re.compile(pattern).findall if pattern else None
        self.find_cut = _find_cut if pattern else None  # where a long text may be cut in pieces

    def __call__(self, text: str, at_start: bool = True) -> list[str]:
        if self.replace_spaces:
            text = text.replace(" ", SPACE)
        if text and text[0] != SPACE and (self.prepend == "always" or (self.prepend == "first" and at_start)):
            text = SPACE + text
        return self._find(text) if self._find else [text] if text else []


def can_cut_before_space(tokens: Iterable[str]) -> bool:
    """Whether no token holds a "▁" behind another character, nor a real space, so that words may be cut there."""
    return not any(" " in token or SPACE in token.lstrip(SPACE) for token in tokens if SPACE in token or " " in token)


class PieceCodec:
    """Ids to text: "▁" is a space, a run of byte tokens is UTF-8 (U+FFFD for each byte if the run is not valid).

    With `strip_first`, one space at the very start of the text is the one that encoding put there, and is removed; a
    stream that continues a text has no such start.
    """

    def __init__(self, tokens: Mapping[int, str], special_ids: frozenset[int], *, strip_first: bool) -> None:
        self._byte_of = {
            i: int(match.group(1), 16)
            for i, token in tokens.items()
            if len(token) == 6 and (match := _BYTE_TOKEN.fullmatch(token))
        }
        self.token_bytes = TokenBytes(tokens, _piece_bytes)
        self._special_ids = special_ids
        self._strip_first = strip_first

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: list[str] = []
        run = bytearray()
        for i in ids:
            data = self.token_bytes[i]
            if skip_special_tokens and i in self._special_ids:
                continue
            if i in self._byte_of:
                run += data
            else:
                text += (_whole_run(run), data.decode())
                run.clear()
        joined = "".join(text) + _whole_run(run)
        return joined.removeprefix(" ") if self._strip_first else joined

    def stream(self, skip_special_tokens: bool, continues: bool) -> StreamDecoder:
        skipped = self._special_ids if skip_special_tokens else frozenset()
        strips = self._strip_first and not continues
        return PieceStream(self.token_bytes.__getitem__, self._byte_of, skipped, strip_first=strips)


def _whole_run(run: bytearray) -> str:
    """A run of byte tokens: one bad byte turns all of it into U+FFFD, as in `tokenizers`."""
    try:
        return run.decode()
    except UnicodeDecodeError:
        return "\N{REPLACEMENT CHARACTER}" * len(run)


class PieceStream:
    """Stream decoder of SentencePiece vocabularies: a character of byte tokens appears with its last byte.

    ``decode`` turns a whole run of byte tokens into U+FFFD when one of its bytes is bad; a stream has shown the
    run's good characters by then and takes nothing back, so there the two differ (as do the reference's).
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        byte_of: Mapping[int, int],
        skipped: frozenset[int],
        *,
        strip_first: bool,
    ) -> None:
        self._token_bytes, self._byte_of, self._skipped = token_bytes, byte_of, skipped
        self._strip_first = strip_first
        self._at_start = strip_first
        self._run = BytesByCharacter()

    def push(self, token_id: int) -> str:
        data = self._token_bytes(token_id)
        if token_id in self._skipped:
            return ""
        if token_id in self._byte_of:
            return self._out(self._run.push(data))
        return self._out(self._run.flush() + data.decode())

    def flush(self) -> str:
        text = self._out(self._run.flush())
        self._at_start = self._strip_first
        return text

    def _out(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


def _piece_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match.group(1), 16)]) if match else token.replace(SPACE, " ").encode("utf-8", "surrogatepass")


def from_gguf(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], added: Sequence[AddedToken]
) -> Tokenizer:
    """The tokenizer of a GGUF file of kind "llama": a token's score says when it is made, the highest first."""
    from labkit.tokenizer.gguf_file import common_options

    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ValueError(
            f"the GGUF file lists {len(tokens)} tokens but {0 if scores is None else len(scores)} scores: it is damaged"
        )
    made = [i for i, kind in enumerate(types) if kind == _NORMAL and len(tokens[i]) > 1]
    order = {score: rank for rank, score in enumerate(sorted({float(scores[i]) for i in made}, reverse=True))}
    ranks = {tokens[i]: order[float(scores[i])] for i in made}
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = next((tokens[i] for i, kind in enumerate(types) if kind == _UNKNOWN), None)
    words = PieceWords(vocab, JoinedRanks(ranks), byte_fallback=_BYTE in types, unknown=unknown)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    normalize = (lambda text: SPACE + text if text else text) if prefix else None  # a space more, even before a space
    return Tokenizer(
        kind="SentencePiece BPE",
        words=words,
        pretokenize=PieceSplit(cut="safe" if can_cut_before_space(ranks) else None),
        added=AddedTokens(added, normalize),
        codec=PieceCodec(
            dict(enumerate(tokens)), frozenset(token.id for token in added if token.special), strip_first=prefix
        ),
        vocab_size=len(tokens),
        **common_options(metadata, tokens, added, add_bos_default=True),
    )
