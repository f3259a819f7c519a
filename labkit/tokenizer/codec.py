"""Token ids back to text: what each id stands for, and how the pieces join."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from labkit.tokenizer.byte_level import from_symbols
from labkit.tokenizer.stream import StreamDecoder, Utf8Stream


class TokenBytes(dict[int, bytes]):
    """id -> bytes, filled as ids are seen; a clear error for an id that is not in the vocabulary."""

    def __init__(self, tokens: Mapping[int, str], to_bytes: Callable[[str], bytes]) -> None:
        super().__init__()
        self.tokens = tokens
        self._to_bytes = to_bytes

    def __missing__(self, token_id: int) -> bytes:
        data = self[token_id] = self._to_bytes(token_text(self.tokens, token_id))
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

    def __init__(self, tokens: Mapping[int, str], special_ids: frozenset[int]) -> None:
        self.token_bytes = TokenBytes(tokens, from_symbols)
        self._special_ids = special_ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        data = list(map(self.token_bytes.__getitem__, ids))
        if skip_special_tokens:
            data = [piece for i, piece in zip(ids, data, strict=True) if i not in self._special_ids]
        return b"".join(data).decode("utf-8", "replace")

    def stream(self, skip_special_tokens: bool) -> StreamDecoder:
        return Utf8Stream(self.token_bytes.__getitem__, self._special_ids if skip_special_tokens else frozenset())
