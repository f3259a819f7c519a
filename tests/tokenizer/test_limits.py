"""Hard cases: bytes without a token, surrogates, ids out of range, very long and pathological texts, chat templates."""

from __future__ import annotations

import base64
import random
import warnings

import pytest
from corpus import corpus
from transformers.utils.chat_template_utils import render_jinja_template

from labkit.tokenizer import Tokenizer, UnencodableWarning, batch, merging


@pytest.fixture
def smollm2(smollm2_metadata):
    return Tokenizer.from_gguf(smollm2_metadata)


# ---- bytes that have no token ----------------------------------------------------------------------------------------


def test_which_bytes_have_no_token(smollm2):
    assert smollm2.unencodable_bytes.hex(" ") == "04 06 13 14 16 1d c0 c1 f1 f2 f5 f6 f7 f8 f9 fa fb fc fd fe ff"


def test_by_default_they_are_left_out_and_reported_each_time(smollm2, pairs):
    for _ in range(2):
        with pytest.warns(UnencodableWarning, match=r"2 character\(s\).*'\\x04' \(U\+0004\) x 2"):
            ids = smollm2.encode("a\x04b\x04")
    assert ids == smollm2.encode("a") + smollm2.encode("b")
    assert ids == pairs("smollm2")[1].encode("a\x04b\x04", add_special_tokens=False).ids


def test_the_other_policies(smollm2, pairs):
    text = "a\x04b \U00040000"
    smollm2.on_unencodable = "error"
    with pytest.raises(ValueError, match=r"2 character\(s\) have no token"):
        smollm2.encode(text)
    smollm2.on_unencodable = "replace"
    assert smollm2.decode(smollm2.encode(text)) == "a\ufffdb \ufffd"
    smollm2.on_unencodable = "drop"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # U+40000 is F1 80 80 80: only F1 has no token, the reference keeps the other three bytes
        assert smollm2.encode(text) == pairs("smollm2")[1].encode(text, add_special_tokens=False).ids
    assert smollm2.decode(smollm2.encode(text)) == "ab " + 3 * "\ufffd"
    with pytest.raises(ValueError, match="must be one of warn, error, replace, drop"):
        smollm2.on_unencodable = "ignore"


def test_batches_report_them_too(smollm2):
    assert smollm2.warm_up() is None
    texts = ["fine " * 4000, "a\x04b"]
    for device in (None, "cpu"):
        with pytest.warns(UnencodableWarning, match="U\\+0004"):
            ids = smollm2.encode_batch(texts, device=device)
        assert list(ids[1]) == smollm2.encode("a") + smollm2.encode("b")


# ---- input that is not text, or not ids
# ---------------------------------------------------------------------------------


@pytest.mark.parametrize("long", [False, True])
def test_lone_surrogates(smollm2, long):
    text = ("word " * 5000 if long else "") + "a\ud800b"
    with pytest.raises(ValueError, match=r"lone surrogate \(U\+D800 at index"):
        smollm2.encode(text)
    for device in (None, "cpu"):
        with pytest.raises(ValueError, match="lone surrogate"):
            smollm2.encode_batch([text, "fine " * 5000], device=device)


def test_wrong_types(smollm2):
    with pytest.raises(TypeError, match="one str, not list"):
        smollm2.encode(["a"])
    with pytest.raises(TypeError, match="list of texts"):
        smollm2.encode_batch("a")
    for device in (None, "cpu"):
        with pytest.raises(TypeError, match="found a int in it"):
            smollm2.encode_batch(["a", 1], device=device)
    with pytest.raises(TypeError, match="token ids, not text"):
        smollm2.decode("a")


@pytest.mark.parametrize("bad", [-1, 49152, 10**12])
def test_ids_out_of_range(smollm2, bad):
    for call in (
        lambda: smollm2.decode([1, bad]),
        lambda: smollm2.token_bytes(bad),
        lambda: smollm2.stream().push(bad),
    ):
        with pytest.raises(
            ValueError, match=f"token id {bad} is not in this vocabulary, whose ids run from 0 to 49151"
        ):
            call()


def test_ids_may_be_tensors_or_arrays(smollm2):
    import numpy as np
    import torch

    ids = smollm2.encode("Hello world")
    assert (
        smollm2.decode(torch.tensor(ids))
        == smollm2.decode(np.array(ids))
        == smollm2.decode(tuple(ids))
        == "Hello world"
    )


def test_nothing(smollm2):
    assert smollm2.encode("") == []
    assert smollm2.decode([]) == ""
    assert smollm2.encode_batch([]) == [] == smollm2.encode_batch([], device="cpu")
    assert [list(ids) for ids in smollm2.encode_batch(["", "a", ""], device="cpu")] == [[], smollm2.encode("a"), []]
    assert smollm2.stream().flush() == ""


# ---- long and pathological
# --------------------------------------------------------------------------------------------

LONG = {
    "one letter": "a" * 100_000,
    "no spaces": base64.b64encode(random.Random(3).randbytes(75_000)).decode(),
    "spaces": " " * 100_000,
    "chinese": "的一是在不了有和人这" * 4_000,
    "quotes": "'" * 50_000,
    "newlines": "\r\n" * 30_000,
}


@pytest.mark.parametrize("kind", LONG)
def test_pathological_texts_are_exact(smollm2, pairs, kind):
    expected = pairs("smollm2")[1].encode(LONG[kind], add_special_tokens=False).ids
    assert batch.encode_in_python(smollm2, LONG[kind], True) == expected
    assert smollm2.warm_up() is None
    assert smollm2.encode(LONG[kind]) == expected
    assert smollm2.encode_batch([LONG[kind]], device="cpu")[0].tolist() == expected


def test_work_grows_no_faster_than_n_log_n(smollm2_metadata):
    """Counted, not timed: table look-ups for one word of n letters."""

    class Counting(dict):
        n = 0

        def get(self, key, default=None):
            self.n += 1
            return super().get(key, default)

    ranks = {merge: rank for rank, merge in enumerate(smollm2_metadata["tokenizer.ggml.merges"])}
    counts = []
    for n in (2_000, 16_000):
        table = Counting(ranks)
        merging.merge_word(["a"] * n, table)
        counts.append(table.n)
    assert counts[1] <= 8.5 * counts[0], counts


def test_the_queue_and_the_scan_agree(smollm2_metadata):
    ranks = {merge: rank for rank, merge in enumerate(smollm2_metadata["tokenizer.ggml.merges"])}
    rng = random.Random(5)
    for _ in range(300):
        symbols = [rng.choice("theaionsr") for _ in range(rng.randint(1, 60))]
        assert merging._merge_by_queue(symbols, ranks) == merging._merge_by_scan(symbols, ranks)


def test_the_word_cache_is_bounded(smollm2, monkeypatch):
    monkeypatch.setattr("labkit.tokenizer.words.CACHE_WORDS", 100)
    text = corpus()[:20_000]
    ids = smollm2.encode(text)
    assert len(smollm2._words) <= 100
    assert smollm2.encode(text) == ids
    smollm2.encode("x" * 1000)
    assert "x" * 1000 not in smollm2._words


def test_chunks_are_cut_where_words_end(smollm2):
    text = corpus()[:60_000]
    pieces = list(batch.chunks(text, 1000))
    assert "".join(pieces) == text
    assert len(pieces) > 20
    assert [i for piece in pieces for i in smollm2.encode(piece)] == smollm2.encode(text)


def test_sentencepiece_texts_are_cut_in_front_of_spaces(pairs, monkeypatch):
    ours, _ = pairs("llama2")
    text = corpus()[-40_000:] + "  x   y\n  z " * 50
    ids = ours.encode(text)
    monkeypatch.setattr(batch, "_CHUNK_CHARS", 997)
    assert ours.encode(text) == ids


# ---- chat templates
# ---------------------------------------------------------------------------------------------------

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <there> é"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "2 + 2?"},
]


@pytest.mark.parametrize("name", ["smollm2", "llama3", "qwen3"])
@pytest.mark.parametrize("n_first", [0, 1])
@pytest.mark.parametrize("generation", [True, False])
def test_templates_render_as_in_transformers(pairs, name, n_first, generation):
    ours, _ = pairs(name)
    messages = CONVERSATION[n_first:]
    variables = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"} if name == "llama3" else {}
    rendered, _ = render_jinja_template(
        conversations=[messages], chat_template=ours.chat_template, add_generation_prompt=generation, **variables
    )
    assert ours.apply_chat_template(messages, add_generation_prompt=generation) == rendered[0]


def test_the_default_models_prompt_by_hand(smollm2):
    assert smollm2.apply_chat_template([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "messages must be a list"),
        ({"role": "user"}, "must be a list"),
        ([{"content": "Hi"}], "message 0 has no role"),
    ],
)
def test_messages_that_are_none(smollm2, messages, message):
    with pytest.raises(ValueError, match=message):
        smollm2.apply_chat_template(messages)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "forbids"),
        ("{{ messages.append(1) }}", "forbids"),
        ("{% for", "not valid Jinja"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        (None, "no chat template"),
    ],
)
def test_a_template_is_a_strangers_code(smollm2, template, message):
    smollm2.chat_template = template
    with pytest.raises(ValueError, match=message):
        smollm2.apply_chat_template(CONVERSATION)
