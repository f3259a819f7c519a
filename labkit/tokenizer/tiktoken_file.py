"""A tokenizer from a tiktoken rank file: one line a token, its bytes in base64 and its rank.

The file names neither the splitting pattern nor the special tokens: they must be given, by the encoding's name or in
full.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path

from labkit.tokenizer.added import AddedToken, AddedTokens
from labkit.tokenizer.byte_level import to_symbols
from labkit.tokenizer.codec import ByteLevelCodec
from labkit.tokenizer.merging import JoinedRanks
from labkit.tokenizer.patterns import TIKTOKEN
from labkit.tokenizer.pretokenize import PreTokenizer
from labkit.tokenizer.tokenizer import Tokenizer
from labkit.tokenizer.words import ByteWords

MAX_BYTES, MAX_RANKS = 64 << 20, 2**20


def load(
    path: str | Path,
    *,
    pattern: str,
    special_tokens: Mapping[str, int] | None = None,
    eos_token: str | None = None,
    chat_template: str | None = None,
) -> Tokenizer:
    """See :meth:`labkit.tokenizer.Tokenizer.from_tiktoken`."""
    vocab = {to_symbols(token): rank for token, rank in read_ranks(path).items()}
    special = dict(special_tokens or {})
    clash = {name: i for name, i in special.items() if i in vocab.values()} if special else {}
    if clash:
        raise ValueError(f"special tokens {clash} use ids that the rank file gives to ordinary tokens")
    if eos_token is not None and eos_token not in special:
        raise ValueError(f"eos_token {eos_token!r} is not among special_tokens {sorted(special)}")
    tokens = {i: token for token, i in vocab.items()} | {i: name for name, i in special.items()}
    return Tokenizer(
        kind="byte-level BPE",
        words=ByteWords(vocab, JoinedRanks(vocab), ignore_merges=True),
        pretokenize=PreTokenizer([TIKTOKEN.get(pattern, pattern)]),
        added=AddedTokens(AddedToken(name, i) for name, i in special.items()),
        codec=ByteLevelCodec(tokens, frozenset(special.values())),
        eos_ids=[] if eos_token is None else [special[eos_token]],
        chat_template=chat_template,
        vocab_size=1 + max(tokens),
    )


def read_ranks(path: str | Path) -> dict[bytes, int]:
    """token bytes -> rank. Raises ValueError with the line number when the file is malformed."""
    ranks: dict[bytes, int] = {}
    if not Path(path).is_file() or Path(path).stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} is no rank file: it must be a regular file of at most {MAX_BYTES:,} bytes")
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if number > MAX_RANKS:
                raise ValueError(f"{path} has more than {MAX_RANKS:,} ranks: no published vocabulary has as many")
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error) as error:
                raise ValueError(f"line {number} of {path} is not '<base64> <rank>': {line[:60]!r}") from error
    if not ranks:
        raise ValueError(f"{path} holds no ranks")
    if len(set(ranks.values())) != len(ranks):
        raise ValueError(f"{path} gives one rank to several tokens: the file is damaged")
    return ranks
