"""Text from a stream of token ids: only whole characters, whatever the token boundaries.

One character may be spread over several tokens (an emoji is four bytes, and a byte-level vocabulary may hold them
singly). Decoding each token alone would show replacement marks; these decoders hold back the bytes of an unfinished
character, and the pieces they return always join to exactly ``tokenizer.decode(all_ids)``.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Protocol


class StreamDecoder(Protocol):
    """What ``Tokenizer.stream()`` returns."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this id, often "" in the middle of a character."""
        ...

    def flush(self) -> str:
        """What is still held back, at the end of the stream; an unfinished character becomes U+FFFD. Resets the
        decoder."""
        ...


class BytesByCharacter:
    """UTF-8 that comes in bytes: each character when it is whole, U+FFFD for each byte that belongs to none."""

    def __init__(self) -> None:
        self._held = b""

    def push(self, data: bytes) -> str:
        """The characters that became whole."""
        return self._out(self._held + data, final=False)

    def flush(self) -> str:
        """The rest, at the end of the bytes."""
        return self._out(self._held, final=True)

    def _out(self, data: bytes, *, final: bool) -> str:
        text = ""
        while True:
            try:
                out, n_used = codecs.utf_8_decode(data, "strict", final)
                self._held = data[n_used:]
                return text + out
            except UnicodeDecodeError as error:
                text += data[: error.start].decode() + "\N{REPLACEMENT CHARACTER}"
                data = data[error.start + 1 :]


class Utf8Stream:
    """Stream decoder of byte-level vocabularies: a token is some bytes, the text is their UTF-8.

    >>> stream = Utf8Stream({1: b"caf", 2: bytes([0xC3]), 3: bytes([0xA9])}.__getitem__, frozenset())
    >>> [stream.push(1), stream.push(2), stream.push(3), stream.flush()]
    ['caf', '', 'é', '']
    """

    def __init__(self, token_bytes: Callable[[int], bytes], skipped: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        data = self._token_bytes(token_id)  # before the test below, so that an id out of range never passes silently
        return "" if token_id in self._skipped else self._utf8.decode(data)

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text
