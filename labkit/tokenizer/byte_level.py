"""GPT-2's alphabet: every byte has a printable stand-in character, so that any text is a string of known symbols.

A byte-level vocabulary is written in this alphabet: "Ġthe" is the four bytes of " the". The printable bytes of Latin-1
stand for themselves; the other 68 (controls, space, 0x7F-0xA0, 0xAD) are moved to U+0100 and up, in order. Source:
Radford et al. 2019, `encoder.py` of the GPT-2 release.

>>> to_symbols(" é".encode())
'ĠÃ©'
>>> from_symbols("ĠÃ©")
b' \\xc3\\xa9'
"""

from __future__ import annotations


def _alphabet() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


ALPHABET: list[str] = _alphabet()  # symbol of each byte
BYTE_OF: dict[str, int] = {symbol: byte for byte, symbol in enumerate(ALPHABET)}
_LATIN1_TO_SYMBOL = {byte: symbol for byte, symbol in enumerate(ALPHABET) if chr(byte) != symbol}


def to_symbols(data: bytes) -> str:
    """The bytes, one stand-in character each."""
    return data.decode("latin-1").translate(_LATIN1_TO_SYMBOL)


def from_symbols(token: str) -> bytes:
    """The bytes a token's text stands for; a token that leaves the alphabet (an added one) means its own UTF-8."""
    try:
        return bytes([BYTE_OF[symbol] for symbol in token])
    except KeyError:
        return token.encode("utf-8", "surrogatepass")
