"""Tokenizer files: what they may ask for, and what is refused with a reason."""

from __future__ import annotations

import json

import pytest
import tiktoken
from corpus import documents, texts
from hypothesis import given, settings
from oracles import write_rank_file
from tokenizers import Tokenizer as Reference

from labkit.tokenizer import Tokenizer, bpe, patterns
from labkit.tokenizer.byte_level import ALPHABET, from_symbols, to_symbols

SYMBOLS = sorted(ALPHABET)


def small_json(**sections) -> dict:
    """A byte-level tokenizer.json with two merges; `sections` replace or add parts."""
    vocab = {symbol: i for i, symbol in enumerate(SYMBOLS)} | {"ab": 256, "Ġab": 257}
    spec = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["a b", "Ġ ab"]},
    }  # fmt: skip
    return spec | sections


def added(content, i, **flags):
    defaults = {"special": False, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    return {"id": i, "content": content} | defaults | flags


def load_both(tmp_path, spec):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    return Tokenizer.from_file(path), Reference.from_file(str(path))


@pytest.mark.parametrize(
    "flags",
    [{}, {"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}, {"single_word": True}, {"normalized":
    True},
     {"special": True, "single_word": True, "rstrip": True}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("normalizer", [None, {"type": "Lowercase"}], ids=["raw", "lowercase"])
def test_added_tokens_behave_as_in_the_reference(tmp_path, flags, normalizer):
    tokens = [added("<X>", 258, **flags), added("<X>>", 259, **flags), added("ab", 260, **flags)]
    ours, reference = load_both(tmp_path, small_json(added_tokens=tokens, normalizer=normalizer))

    @given(texts(["<X>", "<x>", "<X>>", "<X", "ab", "AB", "é", "_"]))
    @settings(max_examples=100, deadline=None)
    def check(text):
        assert ours.encode(text) == reference.encode(text, add_special_tokens=False).ids

    check()


SPLIT = {"type": "Split", "pattern": {"Regex": patterns.O200K}, "behavior": "Removed", "invert": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    "steps",
    [
        [SPLIT, BYTES],
        [{"type": "Digits", "individual_digits": True}, BYTES | {"use_regex": True}],
        [{"type": "Digits", "individual_digits": False}, BYTES | {"use_regex": True}],
        [{"type": "Split", "pattern": {"String": "ab"}, "behavior": "Isolated", "invert": False}, BYTES],
        [BYTES | {"use_regex": True, "add_prefix_space": True}],
        [BYTES],
    ],
    ids=["split", "digits", "digit runs", "string", "prefix space", "no split"],
)
def test_pre_tokenizer_steps(tmp_path, steps):
    ours, reference = load_both(tmp_path, small_json(pre_tokenizer={"type": "Sequence", "pretokenizers": steps}))

    @given(texts(["ab", "abab", " ab"]))
    @settings(max_examples=80, deadline=None)
    def check(text):
        assert ours.encode(text) == reference.encode(text, add_special_tokens=False).ids

    check()


def test_template_and_files_beside(tmp_path):
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [258], "tokens": ["<s>"]}},
    }
    spec = small_json(
        added_tokens=[added("<s>", 258, special=True), added("</s>", 259, special=True)], post_processor=template
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}, "bos_token": "<s>"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 259]}))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    ours, reference = load_both(tmp_path, spec)
    assert ours.encode("ab", add_special_tokens=True) == reference.encode("ab").ids == [258, 256]
    assert (ours.bos_id, ours.eos_ids) == (258, {7, 259})
    assert ours.apply_chat_template([{"role": "user", "content": "ab"}]) == "<s>ab"
    assert Tokenizer.from_file(tmp_path).encode("ab") == [256]  # the folder does as well


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds a list"),
        ("{}", "no model with a vocabulary"),
        ('{"model": {"type": "WordPiece", "vocab": {}}}', "labkit runs BPE models only"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}}}', "malformed: KeyError: 'merges'"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}', "merge 0 .* is 'a b'"),
        ("[" * 100_000, "not valid JSON"),
    ],
    ids=["cut off", "a list", "empty", "another model", "no merges", "wrong merge", "deep"],
)
def test_a_malformed_file(tmp_path, text, message):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_file(path)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}, "normalizer 'Precompiled'"),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Punctuation"}, BYTES]}},
            "cannot run exactly",
        ),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES, {"type": "Digits"}]}}, "after ByteLevel"),
        ({"post_processor": {"type": "Novel"}}, "post-processor 'Novel'"),
        ({"pre_tokenizer": {"type": "WhitespaceSplit"}}, "WhitespaceSplit"),
    ],
)
def test_an_unknown_step_is_refused(tmp_path, section, message):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(small_json(**section)))
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_file(path)


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer file"):
        Tokenizer.from_file(tmp_path / "nothing")


def small_gguf(**changes) -> dict:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*SYMBOLS, "ab", "<|end|>"],
        "tokenizer.ggml.token_type": [1] * 257 + [3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 257,
    }
    return {key: value for key, value in (metadata | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "brand-new"}, "pre-tokenizer is 'brand-new'.*refused"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer is None"),
        ({"tokenizer.ggml.model": "bert"}, "of kind 'bert'"),
        ({"tokenizer.ggml.tokens": None}, "no 'tokenizer.ggml.tokens'"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "merge 0"),
        ({"tokenizer.ggml.token_type": [1]}, "258 tokens but 1 token types"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is 9999"),
    ],
)
def test_a_malformed_gguf(changes, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(small_gguf(**changes))


def test_llama_2_from_gguf_scores(pairs):
    """The GGUF form of a SentencePiece vocabulary: scores in place of merges; the reference is the tokenizer.json."""
    from_json, reference = pairs("llama2")
    made = ["".join(pair) for pair in json.loads(reference.to_str())["model"]["merges"]]
    score = {token: -float(rank) for rank, token in reversed(list(enumerate(made)))}  # the first merge that makes it
    tokens = [reference.id_to_token(i) for i in range(32000)]
    types = [2, 3, 3] + [6] * 256 + [1] * (32000 - 259)
    ours = Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [score.get(token, 0.0) for token in tokens],
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }
    )
    for text in documents()[::20]:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=False)
    assert ours.encode("a", add_special_tokens=True) == from_json.encode("a", add_special_tokens=True)


@pytest.fixture(scope="module")
def ranks():
    """A rank file's content: a vocabulary trained here, its ids as ranks, as GPT-2's and cl100k's are."""
    model = bpe.train(documents()[::6], 2000)
    return {token: rank for rank, token in enumerate(model.tokens)}


@pytest.mark.parametrize(
    ("name", "tiktoken_pattern"),
    [
        ("gpt2", r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""),
        ("cl100k_base", patterns.CL100K),
        ("o200k_base", patterns.O200K),
    ],
)
def test_tiktoken_rank_files(tmp_path, ranks, name, tiktoken_pattern):
    special = {"<|endoftext|>": len(ranks), "<|fim|>": len(ranks) + 5}
    path = write_rank_file(tmp_path / "ranks.tiktoken", ranks)
    ours = Tokenizer.from_tiktoken(path, pattern=name, special_tokens=special, eos_token="<|endoftext|>")
    reference = tiktoken.Encoding(name, pat_str=tiktoken_pattern, mergeable_ranks=ranks, special_tokens=special)

    @given(texts(list(special)))
    @settings(max_examples=150, deadline=None)
    def check(text):
        ids = reference.encode(text, allowed_special="all")
        assert ours.encode(text) == ids
        assert ours.encode(text, parse_special=False) == reference.encode(text, disallowed_special=())
        assert ours.decode(ids) == text

    check()
    for document in documents()[::25]:
        assert ours.encode(document) == reference.encode(document, allowed_special="all")
    assert ours.eos_ids == {len(ranks)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"IQ== 0\nIg==\n", "line 2"),
        (b"***= 0\n", "line 1"),
        (b"", "holds no ranks"),
        (b"IQ== 0\nIg== 0\n", "one rank to several"),
    ],
)
def test_a_malformed_rank_file(tmp_path, content, message):
    path = tmp_path / "bad.tiktoken"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_tiktoken(path, pattern="gpt2")


def test_the_alphabet():
    assert len(set(ALPHABET)) == 256
    assert all(from_symbols(to_symbols(bytes([byte]))) == bytes([byte]) for byte in range(256))
    assert to_symbols(b" \n\x00\xad") == "ĠĊĀŃ"  # as GPT-2's vocab.json writes them
