"""A tokenizer from a ``tokenizer.json`` (the file format of the `tokenizers` library).

The sections are read one by one; a step that labkit cannot run exactly is refused with its name, because skipping it
would give wrong ids without a word. Beside the file, ``tokenizer_config.json`` (or ``chat_template.jinja``) brings the
chat template and ``generation_config.json`` the ids that end a generation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.resources import MALFORMED, read_json_object
from labkit.tokenizer import ends, normalize, sentencepiece
from labkit.tokenizer.added import AddedToken, AddedTokens
from labkit.tokenizer.codec import ByteLevelCodec
from labkit.tokenizer.merging import merge_ranks
from labkit.tokenizer.patterns import COVERS_EVERYTHING, DIGIT, GPT2, SMOLLM
from labkit.tokenizer.pretokenize import PrefixSpace, PreTokenizer
from labkit.tokenizer.sentencepiece import PieceCodec, PieceSplit, PieceWords
from labkit.tokenizer.tokenizer import Tokenizer
from labkit.tokenizer.words import ByteWords

MAX_FILE_BYTES = 256 << 20


def load(path: str | Path) -> Tokenizer:
    """The tokenizer in a file, or in a folder that holds a ``tokenizer.json``."""
    path = Path(path)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"there is no tokenizer file at {path}")
    spec = _read_json(path)
    model = spec.get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("vocab"), Mapping):
        raise ValueError(f"{path} is not a BPE tokenizer.json: it has no model with a vocabulary")
    if model.get("type", "BPE") != "BPE":
        raise ValueError(f"{path} holds a {model['type']} model; labkit runs BPE models only")
    for option in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(option):
            raise ValueError(f"{path} sets {option} = {model[option]!r}, which labkit does not support")
    try:
        return _build(spec, model, path.parent)
    except MALFORMED as error:
        raise ValueError(f"{path} is malformed: {type(error).__name__}: {error}") from error


def _build(spec: Mapping[str, Any], model: Mapping[str, Any], folder: Path) -> Tokenizer:
    vocab: Mapping[str, int] = model["vocab"]
    ranks = merge_ranks(model["merges"], vocab)
    added = [
        AddedToken(
            token["content"], vocab.get(token["content"], token["id"]), token.get("special", False),
            token.get("lstrip", False), token.get("rstrip", False), token.get("single_word", False),
            token.get("normalized", False),
        )
        for token in spec.get("added_tokens") or ()
    ]  # fmt: skip
    tokens = {i: token for token, i in vocab.items()} | {token.id: token.content for token in added}
    special = frozenset(token.id for token in added if token.special)
    steps = _flatten(spec.get("pre_tokenizer"), "pretokenizers")
    byte_level = any(step["type"] == "ByteLevel" for step in steps)
    unknown = model.get("unk_token")
    ignore_merges = bool(model.get("ignore_merges"))
    if byte_level:
        words = ByteWords(vocab, ranks, ignore_merges=ignore_merges, unknown=unknown)
        pretokenize = _byte_level_splits(steps)
        codec = ByteLevelCodec(tokens, special)
    else:
        words = PieceWords(
            vocab, ranks, byte_fallback=bool(model.get("byte_fallback")), unknown=unknown,
            fuse_unknown=bool(model.get("fuse_unk")), ignore_merges=ignore_merges,
        )  # fmt: skip
        pretokenize = _piece_split(steps, vocab, {token.content for token in added})
        codec = PieceCodec(tokens, special, strip_first=_strips_first_space(spec.get("decoder")))
    prefix, suffix = _template(spec.get("post_processor"), {content: i for i, content in tokens.items()})
    return Tokenizer(
        kind="byte-level BPE" if byte_level else "SentencePiece BPE",
        words=words,
        pretokenize=pretokenize,
        added=AddedTokens(added, normalize.build(spec.get("normalizer"))),
        codec=codec,
        prefix_ids=prefix,
        suffix_ids=suffix,
        vocab_size=1 + max(tokens),
        **_beside(folder, {content: i for i, content in tokens.items()}, added),
    )


def _byte_level_splits(steps: Sequence[Mapping[str, Any]]) -> Any:
    patterns: list[str] = []
    add_prefix_space = False
    for i, step in enumerate(steps):
        kind = step["type"]
        if kind == "ByteLevel":
            if i != len(steps) - 1:
                raise ValueError(
                    "the tokenizer file has a pre-tokenizer after ByteLevel, which labkit does not support"
                )
            add_prefix_space = step.get("add_prefix_space", False)
            if step.get("use_regex", True):
                patterns.append(GPT2)
        elif kind == "Digits":
            patterns.append(DIGIT if step.get("individual_digits") else DIGIT + "+")
        elif kind == "Split" and _keeps_everything(step):
            patterns.append(_pattern(step))
        else:
            shown = {key: value for key, value in step.items() if key != "pattern"}
            raise ValueError(f"the tokenizer file asks for the pre-tokenizer {shown}, which labkit cannot run exactly")
    if patterns == [DIGIT, GPT2]:
        patterns = [SMOLLM]  # the two as one expression
    if not add_prefix_space:
        return PreTokenizer(patterns)
    if len(patterns) > 1:
        raise ValueError("add_prefix_space behind another pre-tokenizer is not supported")
    return PrefixSpace(PreTokenizer(patterns))


def _keeps_everything(step: Mapping[str, Any]) -> bool:
    """Whether a Split step isolates its matches; "keep the matches only" is the same if nothing lies between them."""
    if step.get("behavior") == "Isolated":
        return not step.get("invert")
    return step.get("behavior") == "Removed" and step.get("invert", False) and _pattern(step) in COVERS_EVERYTHING


def _pattern(step: Mapping[str, Any]) -> str:
    pattern = step["pattern"]
    return pattern["Regex"] if "Regex" in pattern else re.escape(pattern["String"])


def _piece_split(steps: Sequence[Mapping[str, Any]], vocab: Mapping[str, int], added: set[str]) -> PieceSplit:
    safe = sentencepiece.can_cut_before_space(token for token in vocab if token not in added)
    cut = "safe" if safe else None
    if not steps:
        return PieceSplit(cut=cut, replace_spaces=False)
    kinds = [step["type"] for step in steps]
    if kinds == ["Metaspace"] and steps[0].get("replacement", "▁") == sentencepiece.SPACE:
        step = steps[0]
        scheme = step.get("prepend_scheme") or ("always" if step.get("add_prefix_space", True) else "never")
        return PieceSplit(prepend=scheme, cut="each" if step.get("split", True) else cut)
    if kinds == ["Split"] and steps[0]["pattern"] == {
        "String": " "
    }:  # Gemma: its normalizer has left no space to split at
        return PieceSplit(cut=cut, replace_spaces=False)
    raise ValueError(f"the tokenizer file asks for the pre-tokenizers {kinds}, which labkit cannot run exactly")


def _strips_first_space(decoder: Mapping[str, Any] | None) -> bool:
    strips = False
    for step in _flatten(decoder, "decoders"):
        kind = step["type"]
        if kind == "Strip":
            if (step.get("content"), step.get("start"), step.get("stop")) != (" ", 1, 0):
                raise ValueError(f"the tokenizer file's decoder has the step {dict(step)}, which labkit does not know")
            strips = True
        elif kind == "Metaspace":
            strips = step.get("prepend_scheme", "always") != "never"
        elif kind == "Replace":
            if step.get("pattern") != {"String": "▁"} or step.get("content") != " ":
                raise ValueError(f"the tokenizer file's decoder has the step {dict(step)}, which labkit does not know")
        elif kind not in ("ByteFallback", "Fuse"):
            raise ValueError(f"the tokenizer file's decoder has the step {kind!r}, which labkit does not know")
    return strips


def _template(spec: Mapping[str, Any] | None, ids: Mapping[str, int]) -> tuple[list[int], list[int]]:
    """The ids before and after a single text, from the post-processor."""
    before: list[int] = []
    after: list[int] = []
    for step in _flatten(spec, "processors"):
        if step["type"] == "TemplateProcessing":
            seen_text = False
            for part in step["single"]:
                if "Sequence" in part:
                    seen_text = True
                else:
                    found = step["special_tokens"][part["SpecialToken"]["id"]]["ids"]
                    (after if seen_text else before).extend(found)
        elif step["type"] in ("RobertaProcessing", "BertProcessing"):
            before.append(ids[step["cls"][0]])
            after.append(ids[step["sep"][0]])
        elif step["type"] != "ByteLevel":
            raise ValueError(f"the tokenizer file's post-processor {step['type']!r} is not one that labkit knows")
    return before, after


def _flatten(spec: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    if spec is None:
        return []
    return [step for part in spec[key] for step in _flatten(part, key)] if spec["type"] == "Sequence" else [spec]


def _beside(folder: Path, ids: Mapping[str, int], added: Sequence[AddedToken]) -> dict[str, Any]:
    config = _read_json(folder / "tokenizer_config.json", missing={})
    names = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(key)
        value = value.get("content") if isinstance(value, Mapping) else value
        if value in ids:
            names[key] = value
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{folder}: chat_template is a {type(template).__name__}, but must be text")
    eos_ids = _ends(folder)
    if "eos_token" in names:
        eos_ids.append(ids[names["eos_token"]])
    if template is not None:
        eos_ids += ends.by_name({token.content: token.id for token in added if token.special}, template)
    bos = names.get("bos_token")
    return {
        "bos_id": None if bos is None else ids[bos],
        "eos_ids": eos_ids,
        "chat_template": template,
        "template_variables": names,
    }


def _ends(folder: Path) -> list[int]:
    """``eos_token_id``, a number or a list: generation_config.json's word, else config.json's (as in transformers)."""
    generation = _read_json(folder / "generation_config.json", missing={})
    config = _read_json(folder / "config.json", missing={})
    text_config = config.get("text_config")
    parts = (generation, config, text_config if isinstance(text_config, Mapping) else {})
    stated = next((part["eos_token_id"] for part in parts if part.get("eos_token_id") is not None), [])
    stated = stated if isinstance(stated, list) else [stated]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in stated):
        raise ValueError(f"{folder}: eos_token_id is {stated!r:.80}, but must be a token's number, or a list of them")
    return list(stated)


def _read_json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    if missing is not None and not path.is_file():
        return missing
    return read_json_object(path, max_bytes=MAX_FILE_BYTES)
