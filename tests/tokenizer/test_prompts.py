"""What a model is given for a text, when its answer ends, and how the answer reads: by the references' rules."""

from __future__ import annotations

import unicodedata

import pytest
import small
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from labkit.model import Model, ModelConfig, Transformer
from labkit.model.config import DenseFFN, GroupedAttention, Rope, uniform
from labkit.pipeline import Pipeline
from labkit.sequence import Sequence
from labkit.tokenizer import Tokenizer, letters

TEXTS = ["ab cd", "  ab", "", "é ab", "<s>ab", "xyz 日本 a"]
CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}END{% endif %}{% endfor %}"  # noqa: E501


def model_of(tokenizer: Tokenizer, n_rows: int) -> Model:
    config = ModelConfig("llama", n_rows, 16, 60, uniform(1, GroupedAttention(2, 1, 8, rope=Rope()), DenseFFN(16)))
    transformer = Transformer(config)
    generator = torch.Generator().manual_seed(1)
    for weight in transformer.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator))
    tokenizer.fit(n_rows)
    return Model(transformer, tokenizer, name="tiny")


# ---- around a text -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        small.pieces(),
        small.pieces(post_processor=small.template({"<s>": 1}, {"</s>": 2})),
        small.byte_level(),
        small.byte_level(post_processor=small.template({"<s>": 258}, {})),
    ],
    ids=["llama", "with an end", "none", "bytes"],
)
def test_a_plain_text_gets_what_the_file_prescribes(tmp_path, spec):
    path = small.write(tmp_path, spec)
    ours, reference = Tokenizer.from_file(path), PreTrainedTokenizerFast(tokenizer_file=str(path))
    for text in TEXTS:
        assert ours.encode_prompt(text) == reference(text)["input_ids"], text


def test_the_pipeline_runs_on_these_ids(tmp_path):
    tokenizer = Tokenizer.from_file(small.write(tmp_path, small.pieces()))
    run = Pipeline(model_of(tokenizer, len(small.PIECES)), backend="reference").run("ab", max_new_tokens=1)
    assert run.result().trace.n_prompt_tokens == len([1, *tokenizer.encode("ab")])


@pytest.mark.parametrize("bos", ["<s>", None])
def test_a_template_with_its_own_bos_gets_no_second_one(tmp_path, bos):
    config = {"chat_template": CHAT, **({"bos_token": bos} if bos else {})}
    path = small.write(tmp_path, small.pieces(), tokenizer_config=config)
    ours, reference = Tokenizer.from_file(path), PreTrainedTokenizerFast(tokenizer_file=str(path), **config)
    messages = [{"role": "user", "content": "ab"}]
    ids = ours.encode_prompt(ours.apply_chat_template(messages, add_generation_prompt=False), chat=True)
    assert ids == reference.apply_chat_template(messages, return_dict=False)
    assert ids.count(1) == (1 if bos else 0)


def test_a_gguf_by_llama_cpps_rules():
    """Ids as xllamacpp 2026.10 gave them (its server's /tokenize with add_special, /v1/chat/completions) for these
    vocabularies in a one-layer model: BOS is SentencePiece's default, and a chat has exactly one."""
    plain = Tokenizer.from_gguf(small.pieces_gguf())
    both = Tokenizer.from_gguf(small.pieces_gguf(**{"ggml.add_bos_token": False, "ggml.add_eos_token": True}))
    theirs = {"ab": [269], " ab": [259, 269], "ab cd": [269, 259, 271], "é": [259, 198, 172], "<s>ab": [1, 269]}
    for text, ids in theirs.items():
        assert plain.encode_prompt(text) == [1, *ids]
        assert both.encode_prompt(text) == [*ids, 2]
    assert (plain.bos_id, plain.eos_ids) == (1, {2})
    for template in ("<s>{{ messages[0].content }}", "{{ messages[0].content }}"):
        chats = Tokenizer.from_gguf(small.pieces_gguf(chat_template=template))
        text = chats.apply_chat_template([{"role": "user", "content": "ab"}])
        assert chats.encode_prompt(text, chat=True).count(1) == 1


# ---- the end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ({"config": {"eos_token_id": 7}}, {7}),
        ({"config": {"eos_token_id": [7, 9]}}, {7, 9}),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": 9}}, {9}),
        ({"config": {"text_config": {"eos_token_id": 7}}}, {7}),
        ({"config": {"eos_token_id": 7}, "tokenizer_config": {"eos_token": "</s>"}}, {7, 259}),
        ({"tokenizer_config": {"eos_token": "</s>", "chat_template": "{{ messages }}<|im_end|>"}}, {259, 260}),
        ({"tokenizer_config": {"eos_token": "</s>", "chat_template": "{{ messages }}"}}, {259}),
    ],
)
def test_which_ids_end_a_text(tmp_path, beside, expected):
    assert Tokenizer.from_file(small.write(tmp_path, small.byte_level(), **beside)).eos_ids == expected


def test_what_the_template_writes_behind_an_answer_ends_it(tmp_path):
    spec = small.byte_level(added_tokens=[small.added("</s>", 258), small.added("END", 259)])
    path = small.write(tmp_path, spec, tokenizer_config={"eos_token": "</s>", "chat_template": CHAT})
    tokenizer = Tokenizer.from_file(path)
    assert tokenizer.eos_ids == {258}
    tokenizer.apply_chat_template([{"role": "user", "content": "ab"}])
    assert tokenizer.eos_ids == {258, 259}


@pytest.mark.parametrize("bad", [-1, "2", [1, None], 1.5, True])
def test_an_end_that_is_no_id(tmp_path, bad):
    path = small.write(tmp_path, small.byte_level(), config={"eos_token_id": bad})
    with pytest.raises(ValueError, match="eos_token_id is"):
        Tokenizer.from_file(path)


def test_a_stop_string_may_be_a_special_token(tmp_path):
    tokenizer = Tokenizer.from_file(small.write(tmp_path, small.byte_level()))
    model = model_of(tokenizer, 261)
    ids = [*tokenizer.encode("ab "), 260, *tokenizer.encode("a")]

    class Clock:
        def __call__(self, _):
            return torch.inference_mode()

        def now_s(self):
            return 0.0

    def written(stop):
        sequence = Sequence(model, [1], timer=Clock(), stop=stop)
        n = sequence.accept(ids)
        sequence.finish()
        return "".join(sequence.text), n, sequence.finish_reason

    n_before = len(ids) - 2
    assert written(["<|im_end|>"]) == ("ab ", n_before + 1, "stop")
    assert written(["b <|im"]) == ("a", n_before + 1, "stop")  # half of the special token is enough
    assert written(["<|im_end|>b"]) == ("ab a", len(ids), None)  # held back, and shown without the special token
    assert written([]) == ("ab a", len(ids), None)


# ---- sizes that differ -------------------------------------------------------------------------------------------


def test_a_padded_vocabularys_ids_decode_to_nothing(tmp_path):
    tokenizer = Tokenizer.from_file(small.write(tmp_path, small.byte_level()))
    with pytest.raises(ValueError, match="not in this vocabulary"):
        tokenizer.decode([300])
    tokenizer.fit(320)
    assert tokenizer.decode([256, 300, 319, 256]) == "abab"
    with pytest.raises(ValueError, match="not in this vocabulary"):
        tokenizer.decode([320])
    done = Pipeline(model_of(tokenizer, 320), backend="reference").generate("ab", max_new_tokens=30, ignore_eos=True)
    assert len(done.token_ids) == 30  # counted, whether they have text or not


def test_a_tokenizer_larger_than_the_embedding(tmp_path):
    tokenizer = Tokenizer.from_file(small.write(tmp_path, small.byte_level()))
    with pytest.raises(ValueError, match=r"2 of 258 tokens, 'ab' \(id 256\) for one, have no row among .* 256"):
        tokenizer.fit(256)
    tokenizer.fit(260)  # Gemma 3: an added token without a row, which only its other halves use
    assert tokenizer.encode_prompt("ab</s>") == [256, 259]
    with pytest.raises(ValueError, match=r"'<\|im_end\|>' has the id 260, but the model has rows for 260"):
        tokenizer.encode_prompt("ab<|im_end|>")


# ---- how an answer reads -----------------------------------------------------------------------------------------


def test_an_answer_continues_its_prompt(tmp_path):
    tokenizer = Tokenizer.from_file(small.write(tmp_path, small.pieces()))
    ids = [small.PIECES.index(piece) for piece in ("▁ab", "cd", "▁a")]
    for continues, expected in ((True, " abcd a"), (False, "abcd a")):
        stream = tokenizer.stream(continues=continues)
        assert "".join(map(stream.push, ids)) + stream.flush() == expected


@given(st.text(alphabet="aé日😀", max_size=8), st.binary(max_size=3))
@settings(max_examples=60, deadline=None)
def test_characters_of_byte_tokens_appear_as_each_completes(tmp_path_factory, text, tail):
    tokenizer = Tokenizer.from_gguf(small.pieces_gguf(**{"ggml.add_space_prefix": False}))
    stream = tokenizer.stream()
    shown = ""
    for char in text:
        for byte in char.encode():
            shown += stream.push(small.PIECES.index(f"<0x{byte:02X}>"))
        assert shown.endswith(char)
    rest = "".join(stream.push(small.PIECES.index(f"<0x{byte:02X}>")) for byte in tail) + stream.flush()
    assert shown == text
    assert rest.replace("\ufffd", "") == tail.decode("utf-8", "ignore")


# ---- letters -----------------------------------------------------------------------------------------------------


def test_lower_case_is_the_references():
    reference = normalizers.Lowercase()
    every = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code <= 0xDFFF)
    assert letters.lower(every) == reference.normalize_str(every)
    assert letters.lower("ΟΔΟΣ ΑΣ. İ") == reference.normalize_str("ΟΔΟΣ ΑΣ. İ")


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_normal_forms_are_the_references(form):
    reference = getattr(normalizers, form)()
    marks = [chr(c) for c in range(0x110000) if unicodedata.combining(chr(c))]
    made = [chr(c) for c in range(0x110000) if unicodedata.decomposition(chr(c))]
    assert all(reference.normalize_str(char) == letters.normal_form(form, char) for char in marks + made)
    parts = [*marks, *made, *{part for char in made for part in unicodedata.normalize("NFKD", char)}]

    @given(st.lists(st.sampled_from(parts), max_size=6).map("".join))
    @settings(max_examples=300, deadline=None)
    def check(text):
        assert reference.normalize_str(text) == letters.normal_form(form, text)

    check()


@pytest.mark.parametrize("strip", [(True, False), (False, True), (True, True)])
def test_strip(tmp_path, strip):
    normalizer = {"type": "Strip", "strip_left": strip[0], "strip_right": strip[1]}
    path = small.write(tmp_path, small.byte_level(normalizer=normalizer))
    for text in ("  ab ", "\u2003ab\x1f", "ab", " "):
        assert Tokenizer.from_file(path).encode(text) == Reference.from_file(str(path)).encode(text).ids


def test_added_tokens_of_a_gguf_are_written_as_they_are():
    """Token texts of llama.cpp's llama_token_to_piece: an added token is plain text, in no byte alphabet."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*small.SYMBOLS, "<é>", "<ô>"],
        "tokenizer.ggml.token_type": [1] * 256 + [4, 3],
        "tokenizer.ggml.merges": [],
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode("a<é>é<ô>")
    assert ids[1] == 256
    assert ids[-1] == 257
    assert tokenizer.decode(ids) == "a<é>é<ô>"


def test_merges_of_real_spaces(tmp_path):
    tokens = ["<unk>", " ", "a", "b", "  ", " a", "a b", "   "]
    merges = [[" ", " "], [" ", "a"], ["a", " b"], ["  ", " "], [" ", "b"], ["a ", "b"]]
    vocab = {token: i for i, token in enumerate([*tokens, " b", "a "])}
    model = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": False, "vocab": vocab,
             "merges": merges}  # fmt: skip
    decoder = {"type": "Fuse"}
    spec = small.pieces(
        normalizer=None, decoder=decoder, model=model, post_processor=None, added_tokens=[small.added("<unk>", 0)]
    )
    path = small.write(tmp_path, spec)
    ours, reference = Tokenizer.from_file(path), Reference.from_file(str(path))

    @given(st.text(alphabet=" ab", max_size=20))
    @settings(max_examples=150, deadline=None)
    def check(text):
        ids = reference.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == reference.decode(ids)

    check()
