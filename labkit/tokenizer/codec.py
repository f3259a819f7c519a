"""Token ids back to text: what each id stands for, and how the pieces join."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.tokenizer.byte_level import from_symbols
from labkit.tokenizer.stream import StreamDecoder, Utf8Stream


class TokenBytes(dict[int, bytes]):
    """id -> bytes, filled as ids are seen; a clear error for an id that is not in the vocabulary.

    ``as_written`` are the ids of added tokens, whose text is what it is and in no alphabet. Below ``n_rows`` an id
    without a token is one of the rows that models are padded with: it stands for no bytes.
    """

    def __init__(
        self, tokens: Mapping[int, str], to_bytes: Callable[[str], bytes], as_written: frozenset[int] = frozenset()
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.n_rows = 0
        self._to_bytes = to_bytes
        self._as_written = as_written

    def __missing__(self, token_id: int) -> bytes:
        if isinstance(token_id, int) and 0 <= token_id < self.n_rows and token_id not in self.tokens:
            return b""
        text = token_text(self.tokens, token_id)
        data = text.encode("utf-8", "surrogatepass") if token_id in self._as_written else self._to_bytes(text)
        self[token_id] = data
        return data


def token_text(tokens: Mapping[int, str], token_id: int) -> str:
    """The vocabulary's own string for an id. Raises ValueError when there is none."""
    try:
        return tokens[token_id]
    except (KeyError, TypeError):
        highest = max(tokens, default=-1)
        raise ValueError(
            f"token id {token_id!r} is not in this vocabulary, whose ids run from 0 to {highest}"
            + (" with gaps" if len(tokens) <= highest else "")
        ) from None


class ByteLevelCodec:
    """Byte-level vocabularies: the tokens' bytes, joined and read as UTF-8; each invalid stretch becomes U+FFFD."""

    def __init__(
        self, tokens: Mapping[int, str], special_ids: frozenset[int], as_written: frozenset[int] = frozenset()
    ) -> None:
        self.token_bytes = TokenBytes(tokens, from_symbols, as_written)
        self._special_ids = special_ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        data = list(map(self.token_bytes.__getitem__, ids))
        if skip_special_tokens:
            data = [piece for i, piece in zip(ids, data, strict=True) if i not in self._special_ids]
        return b"".join(data).decode("utf-8", "replace")

    def stream(self, skip_special_tokens: bool, continues: bool) -> StreamDecoder:
        return Utf8Stream(self.token_bytes.__getitem__, self._special_ids if skip_special_tokens else frozenset())


def as_ids(ids: Any) -> list[int]:
    """Token ids out of a list, a tensor, an array, or one number."""
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if isinstance(ids, int):
        return [ids]
    if isinstance(ids, str):
        raise TypeError("decode() takes token ids, not text")
    ids = list(ids)
    if ids and not isinstance(ids[0], int):
        ids = [int(i) for i in ids]
    return ids
