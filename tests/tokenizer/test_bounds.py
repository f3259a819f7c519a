"""Programs inside a model's files: bounded in time, memory and output, and their errors are the documented one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import small
from tokenizers import Tokenizer as Reference

from labkit.tokenizer import Tokenizer, apart, chat
from labkit.tokenizer.pretokenize import PreTokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(apart, "LIMIT_S", 0.3)


@pytest.mark.parametrize(
    ("template", "bound"),
    [
        ("{{ 9 ** (9 ** (9 ** 9)) }}", "stopped after|MemoryError|wanted more than"),  # Jinja's compiler computes it
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "stopped after 0.3 s"),
        ("{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}", "stopped after"),
        ("{{ 'a' * 10 ** 10 }}", "wanted more than 256 MB"),
        ("{{ 'a'|center(10 ** 10) }}", "wanted more than 256 MB"),
        ("{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}", "writes more than 8,000,000 characters"),
    ],
)
def test_a_template_is_bounded(soon, template, bound):
    with pytest.raises(ValueError, match=bound):
        chat.render(template, MESSAGES)
    assert chat.render("{{ messages[0].content }}", MESSAGES) == "Hi"  # the next one is not harmed


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\n{{ none + 1 }}", "in line 2: TypeError"),
        ("{{ [1] + 'a' }}", "in line 1: TypeError"),
        ("\n\n{{ 1 / messages|length - 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}\n{{ m() }}", "RecursionError"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
        ("{{ range(10 ** 9) }}", "OverflowError"),
        ("{% set x = messages[0].none.more %}", "in line 1"),
        ("{% include 'x' %}", "TypeError|no loader"),
        ("{% break %}", "not valid Jinja"),
    ],
)
def test_a_templates_own_errors(template, message):
    with pytest.raises(ValueError, match=message):
        chat.render(template, MESSAGES)


def test_loading_looks_at_no_template(tmp_path):
    """It says nothing of what the first chat will say: nothing was compiled."""
    spec = small.byte_level()
    path = small.write(tmp_path, spec, tokenizer_config={"chat_template": "{{ 9 ** (9 ** (9 ** 9)) }}{% for"})
    tokenizer = Tokenizer.from_file(path)
    tokenizer.prepare_chat()
    with pytest.raises(ValueError, match="not valid Jinja"):
        tokenizer.apply_chat_template(MESSAGES)


def test_variables_that_json_cannot_say():
    with pytest.raises(ValueError, match="what JSON can say"):
        chat.render("{{ x }}", MESSAGES, x=object())


# ---- patterns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "text"), [(r"(a+)+$", "a" * 40 + "b"), (r"(a|a)*b", "a" * 40), (r"(.*)*x", "a" * 600)]
)
def test_a_pattern_is_bounded(soon, tmp_path, pattern, text):
    steps = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
             {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]  # fmt: skip
    spec = small.byte_level(pre_tokenizer={"type": "Sequence", "pretokenizers": steps})
    tokenizer = Tokenizer.from_file(small.write(tmp_path, spec))
    with pytest.raises(apart.TooMuch, match=r"pattern .* was stopped after"):
        tokenizer.encode(text)


@pytest.mark.parametrize("pattern", [r"\s?(?:\p{L}\p{M}*)+|\p{N}{2}", "[^\\s]+", r"(?i:the|of) ", "日本?"])
def test_a_strangers_pattern_splits_as_the_reference(tmp_path, pattern):
    steps = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
             {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]  # fmt: skip
    path = small.write(tmp_path, small.byte_level(pre_tokenizer={"type": "Sequence", "pretokenizers": steps}))
    ours, reference = Tokenizer.from_file(path), Reference.from_file(str(path))
    for text in ("The abab of 1234 日本 日", "", "ab", "\U00010400 ab é"):
        assert ours.encode(text) == reference.encode(text).ids


def test_patterns_that_are_no_patterns():
    with pytest.raises(ValueError, match="not a regular expression that labkit can run exactly"):
        PreTokenizer(["(a"])
    with pytest.raises(ValueError, match="5,000 characters"):
        PreTokenizer(["a" * 5000])
    assert PreTokenizer([r"a\+b"])("xa+by") == ["x", "a+b", "y"]


# ---- normalizers -------------------------------------------------------------------------------------------------


def test_a_normalizer_that_multiplies_its_text(tmp_path):
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    for steps in ([double] * 40, [{"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 200_000}]):
        spec = small.byte_level(normalizer={"type": "Sequence", "normalizers": steps})
        with pytest.raises(ValueError, match=r"normalizer makes .* characters of"):
            Tokenizer.from_file(small.write(tmp_path, spec)).encode("a" * 100)
    with pytest.raises(ValueError, match="65 normalizers in a row"):
        Tokenizer.from_file(
            small.write(tmp_path, small.byte_level(normalizer={"type": "Sequence", "normalizers": [double] * 65}))
        )


# ---- the process -------------------------------------------------------------------------------------------------


def test_the_process_ends_with_the_one_that_asks():
    code = "from labkit.tokenizer import apart, chat\nchat.render('{{ 1 }}', [])\nprint(apart._process.popen.pid)"
    import psutil

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert not psutil.pid_exists(int(done.stdout))
