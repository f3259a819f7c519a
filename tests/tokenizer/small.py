"""Small tokenizer files of every kind, made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labkit.tokenizer.byte_level import ALPHABET

SYMBOLS = sorted(ALPHABET)


def added(content: str, i: int, **flags: Any) -> dict[str, Any]:
    defaults = {"special": True, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    return {"id": i, "content": content} | defaults | flags


def template(before: dict[str, int], after: dict[str, int]) -> dict[str, Any]:
    """A post-processor that puts special tokens around a text."""
    part = lambda name: {"SpecialToken": {"id": name, "type_id": 0}}  # noqa: E731
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [*map(part, before), text, *map(part, after)]
    named = {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in (before | after).items()}
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": named}


def byte_level(**sections: Any) -> dict[str, Any]:
    """A byte-level tokenizer.json with two merges and two special tokens; `sections` replace or add parts."""
    vocab = {symbol: i for i, symbol in enumerate(SYMBOLS)} | {"ab": 256, "Ġab": 257}
    spec = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [added("<s>", 258), added("</s>", 259), added("<|im_end|>", 260)],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["a b", "Ġ ab"]},
    }  # fmt: skip
    return spec | sections


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdefgh", "ab", "▁ab", "▁a", "cd"]
MERGES = ["a b", "▁ ab", "▁ a", "c d"]


def pieces(**sections: Any) -> dict[str, Any]:
    """A tokenizer.json as Llama 2's: SentencePiece BPE with a space in front and bytes for what has no piece."""
    spec = {
        "version": "1.0", "truncation": None, "padding": None, "pre_tokenizer": None,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "post_processor": template({"<s>": 1}, {}),
        "added_tokens": [added(name, i) for i, name in enumerate(PIECES[:3])],
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
                  "vocab": {token: i for i, token in enumerate(PIECES)}, "merges": MERGES},
    }  # fmt: skip
    return spec | sections


def pieces_gguf(**changes: Any) -> dict[str, Any]:
    """The same vocabulary as GGUF metadata: scores in place of merges."""
    score = {"".join(merge.split()): -float(rank) for rank, merge in enumerate(MERGES)}
    types = [2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 259)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": [score.get(token, -100.0) for token in PIECES],
        "tokenizer.ggml.token_type": types,
    }
    return metadata | {f"tokenizer.{key}": value for key, value in changes.items()}


def write(folder: Path, spec: dict[str, Any], **beside: Any) -> Path:
    """The tokenizer.json in `folder`, and other JSON files beside it by their stem."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, content in {"tokenizer": spec, **beside}.items():
        (folder / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder / "tokenizer.json"
