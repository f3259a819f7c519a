"""A tokenizer from the metadata of a GGUF file.

Source of the keys: the GGUF specification, section "Tokenizer"; token types: 1 normal, 2 unknown, 3 control, 4
user-defined, 5 unused, 6 byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.resources import MALFORMED
from labkit.tokenizer import ends
from labkit.tokenizer.added import AddedToken, AddedTokens
from labkit.tokenizer.codec import ByteLevelCodec
from labkit.tokenizer.merging import merge_ranks
from labkit.tokenizer.patterns import GGUF_IGNORE_MERGES, GGUF_PRE
from labkit.tokenizer.pretokenize import PreTokenizer
from labkit.tokenizer.tokenizer import Tokenizer
from labkit.tokenizer.words import ByteWords

MAX_TOKENS = 2**20
"""Four times the largest published vocabulary."""
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


def load(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file describes. Raises ValueError when it is malformed or of a kind labkit does not
    know."""
    try:
        return _load(metadata)
    except MALFORMED as error:
        raise ValueError(f"the GGUF file's tokenizer is malformed: {type(error).__name__}: {error}") from error


def _load(metadata: Mapping[str, Any]) -> Tokenizer:
    model = _need(metadata, "tokenizer.ggml.model")
    tokens = list(_need(metadata, "tokenizer.ggml.tokens"))
    if len(tokens) > MAX_TOKENS or not all(isinstance(token, str) for token in tokens):
        raise ValueError(f"the GGUF file's vocabulary must be at most {MAX_TOKENS} texts; it has {len(tokens)} entries")
    types = metadata.get("tokenizer.ggml.token_type")
    types = [1] * len(tokens) if types is None else list(types)
    if len(types) != len(tokens):
        raise ValueError(f"the GGUF file lists {len(tokens)} tokens but {len(types)} token types")
    added = [
        AddedToken(tokens[i], i, special=kind != _USER_DEFINED)
        for i, kind in enumerate(types)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    if model == "gpt2":
        return _byte_level(metadata, tokens, added)
    if model == "llama":
        from labkit.tokenizer.sentencepiece import from_gguf

        return from_gguf(metadata, tokens, types, added)
    raise ValueError(
        f"the GGUF file's tokenizer is of kind {model!r}; "
        'labkit knows "gpt2" (byte-level BPE) and "llama" (SentencePiece BPE)'
    )


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], added: Sequence[AddedToken]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in GGUF_PRE:
        raise ValueError(
            f"the GGUF file's pre-tokenizer is {pre!r}, which labkit does not know. Guessing would give "
            f"wrong token ids, so it is refused; known names: {', '.join(sorted(GGUF_PRE))}"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    ranks = merge_ranks(_need(metadata, "tokenizer.ggml.merges"), vocab)
    words = ByteWords(vocab, ranks, ignore_merges=pre in GGUF_IGNORE_MERGES)
    special = frozenset(token.id for token in added if token.special)
    return Tokenizer(
        kind="byte-level BPE",
        words=words,
        pretokenize=PreTokenizer(GGUF_PRE[pre]),
        added=AddedTokens(added),
        codec=ByteLevelCodec(dict(enumerate(tokens)), special, frozenset(token.id for token in added)),
        vocab_size=len(tokens),
        **common_options(
            metadata, tokens, added, add_bos_default=pre in GGUF_IGNORE_MERGES and pre not in ("gpt-4o", "llama4")
        ),
    )


def common_options(
    metadata: Mapping[str, Any], tokens: Sequence[str], added: Sequence[AddedToken], *, add_bos_default: bool
) -> dict[str, Any]:
    """BOS, EOS and the chat template: what every kind of tokenizer reads from the same keys."""

    def token_id(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if not 0 <= int(value) < len(tokens):
            raise ValueError(f"the GGUF file's {name}_token_id is {value}, outside its {len(tokens)} tokens")
        return int(value)

    bos, eos, padding = token_id("bos"), token_id("eos"), token_id("padding")
    if metadata.get("tokenizer.ggml.model") == "llama":  # SentencePiece's own numbers, where a file names none
        bos, eos = (1 if bos is None else bos), (2 if eos is None else eos)
    end_ids = [i for i in (eos, token_id("eot"), token_id("eom")) if i is not None]
    end_ids += ends.by_name({token.content: token.id for token in added})
    prefix = [] if bos is None or not metadata.get("tokenizer.ggml.add_bos_token", add_bos_default) else [bos]
    named = {"bos_token": bos, "eos_token": eos, "pad_token": padding, "unk_token": token_id("unknown")}
    return {
        "bos_id": bos,
        "eos_ids": end_ids,
        "chat_template": metadata.get("tokenizer.chat_template"),
        "template_variables": {name: tokens[i] for name, i in named.items() if i is not None},
        "prefix_ids": prefix,
        "chat_prefix_ids": prefix,
        "suffix_ids": [eos] if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False) else [],
    }


def _need(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ValueError(f"the GGUF file has no {key!r}: it carries no tokenizer that labkit can use")
    return metadata[key]
