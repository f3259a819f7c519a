"""Splitting: every pattern family against the regex engine of `tokenizers`, in each width and by each scanner."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
import torch
from corpus import documents, texts
from hypothesis import given, settings
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from labkit.tokenizer import patterns, unicode16
from labkit.tokenizer.device_split import word_starts
from labkit.tokenizer.pretokenize import PreTokenizer
from labkit.tokenizer.rules import RULES, class_table
from labkit.tokenizer.translate import translate

ENGINE = {name: getattr(patterns, name) for name in ("GPT2", "LLAMA3", "QWEN2", "QWEN35", "O200K", "TEKKEN")}


def split_by_reference(name: str):
    """The reference's own pre-tokenizer of a family."""
    if name == "SMOLLM":
        gpt2 = pre_tokenizers.Split(Regex(patterns.GPT2), "isolated")
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if name == "DEEPSEEK3":
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(p), "isolated") for p in patterns.DEEPSEEK3])
    return pre_tokenizers.Split(Regex(ENGINE[name]), "isolated")


@pytest.mark.parametrize("name", [*ENGINE, "SMOLLM", "DEEPSEEK3"])
def test_the_engine_splits_alike(name):
    reference = split_by_reference(name)
    found = getattr(patterns, name)
    ours = PreTokenizer(found if isinstance(found, tuple) else [found])

    @given(texts())
    @settings(max_examples=150, deadline=None)
    def check(text):
        words = ours(text)
        assert words == [word for word, _ in reference.pre_tokenize_str(text)]
        assert "".join(words) == text

    check()
    for document in documents()[::25]:
        assert ours(document) == [word for word, _ in reference.pre_tokenize_str(document)]


@pytest.mark.parametrize(
    "pattern", RULES, ids=lambda pattern: next(k for k, v in vars(patterns).items() if v == pattern)
)
def test_the_scanners_split_like_the_engine(pattern):
    kernels = pytest.importorskip("labkit.tokenizer.native_split", reason="the compiled scanner needs numba")
    rule = RULES[pattern]
    numbers = [rule.any_prefix, rule.max_numbers, rule.numbers_end_text, rule.whole_tail]
    classes, settings_ = class_table(rule), np.array(numbers, np.int64)
    tensor_classes = torch.from_numpy(classes.copy())
    ours = PreTokenizer([pattern])

    def check(parts):
        parts = [part for part in parts if part]
        if not parts:
            return
        raw = "".join(parts).encode()
        data = np.frombuffer(raw, np.uint8)
        expected, compiled, begins, at = [], [], [], 0
        for part in parts:  # texts that stand side by side in the buffer must not see one another
            begins.append(at)
            end = at + len(part.encode())
            for word in ours(part):
                expected.append(at)
                at += len(word.encode())
            i = begins[-1]
            while i < end:
                compiled.append(i)
                i = int(kernels.word_end(data, np.int64(i), np.int64(end), classes, settings_))
        assert compiled == expected
        tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        assert word_starts(tensor, torch.tensor(begins), tensor_classes, rule).tolist() == expected

    @given(texts(), texts(), texts())
    @settings(max_examples=150, deadline=None)
    def check_any(first, second, third):
        check([first, second, third])

    check_any()
    check(documents()[::30])


def test_categories_agree_with_pythons_own():
    """On every code point that this Python assigns (a few changed category between versions of Unicode)."""
    table = [category for category, low, high in unicode16.category_runs() for _ in range(low, high + 1)]
    differing = [
        code
        for code, category in enumerate(table)
        if unicodedata.category(chr(code)) not in ("Cn", category) and category != "Cn"
    ]
    assert len(differing) <= 3, [hex(code) for code in differing]


def test_word_characters_are_those_of_the_reference():
    """What a `single_word` added token must not touch."""
    reference = Tokenizer(models.BPE({"<X>": 0}, []))
    reference.add_tokens([AddedToken("<X>", single_word=True, normalized=False)])
    codes = [*range(0xD800), *range(0xE000, 0x12000), *range(0x16A00, 0x17000), *range(0x1D000, 0x1FC00)]
    for code, row in zip(codes, reference.encode_batch([chr(code) + "<X>" for code in codes]), strict=True):
        assert unicode16.is_word_character(chr(code)) == (not row.ids), hex(code)


def test_white_space_is_unicodes_not_pythons():
    assert "\x1c".isspace()
    assert PreTokenizer([patterns.GPT2])("a\x1cb") == ["a", "\x1c", "b"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"\p{Greek}+", "not a class"),
        (r"\w+", "not understood"),
        ("[a-z", "not closed"),
        (r"[\p{L}&&[a]]", "intersection"),
    ],
)
def test_what_cannot_be_run_exactly_is_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        translate(pattern)


def test_a_broken_expression_is_refused():
    with pytest.raises(ValueError, match="not a regular expression"):
        PreTokenizer(["(a"])
