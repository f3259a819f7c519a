"""Batches: the compiled encoder, the tensor encoder and the Triton kernel give exactly the ids of the plain path."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from corpus import corpus, documents, texts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labkit.tokenizer import batched, native

NAMES = ["smollm2", "gpt2", "llama3", "qwen3"]
relaxed = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_encoder_on_the_corpus(pairs, expected, name):
    ours, reference = pairs(name)
    assert ours.warm_up() is None
    assert ours.encode_batch(documents()) == expected(name)
    text = corpus()[300_000:]
    assert ours.encode(text) == reference.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", NAMES)
def test_the_tensor_encoder_on_the_corpus(pairs, expected, name):
    ours, _ = pairs(name)
    ids = ours.encode_batch(documents()[::8], device="cpu")
    assert all(row.dtype == torch.int32 and row.device.type == "cpu" for row in ids)
    assert [row.tolist() for row in ids] == expected(name)[::8]


@pytest.mark.parametrize("name", NAMES)
def test_any_batch(pairs, name, monkeypatch):
    ours, reference = pairs(name)
    assert ours.warm_up() is None
    monkeypatch.setattr(native, "WORTH_CALLING_BYTES", 0)
    special = [token.content for token in ours.added_tokens][:4]

    @given(st.lists(texts(special, assigned_only=name == "qwen3"), max_size=6))
    @relaxed
    def check(batch):
        expected = [reference.encode(text, add_special_tokens=False).ids for text in batch]
        assert ours.encode_batch(batch) == expected
        assert [row.tolist() for row in ours.encode_batch(batch, device="cpu")] == expected

    check()


def test_groups_join(pairs, monkeypatch):
    """Batches larger than what is on the device at a time."""
    ours, reference = pairs("smollm2")
    encoder = batched.DeviceEncoder(ours, torch.device("cpu"))
    encoder._group_bytes = 5_000
    docs = documents()[::30]
    expected = [encoding.ids for encoding in reference.encode_batch(docs, add_special_tokens=False)]
    assert [row.tolist() for row in encoder.encode(docs)] == expected
    monkeypatch.setattr("labkit.tokenizer.batch._GROUP_CHARS", 10_000)
    assert ours.encode_batch(docs) == expected


def test_a_tokenizer_that_cannot_be_batched_still_answers(pairs):
    ours, reference = pairs("llama2")
    assert "not byte-level" in batched.why_not(ours)
    assert "does not cover" in ours.warm_up()
    docs = documents()[:3]
    expected = [encoding.ids for encoding in reference.encode_batch(docs, add_special_tokens=False)]
    assert [row.tolist() for row in ours.encode_batch(docs, device="cpu")] == expected == ours.encode_batch(docs)


def test_a_kernel_must_prove_itself(pairs, monkeypatch):
    """On a GPU the Triton kernel serves only after it gave the rounds' own result on this tokenizer's tokens."""
    ours, _ = pairs("gpt2")
    encoder = batched.DeviceEncoder(ours, torch.device("cpu"))
    monkeypatch.setattr(encoder, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_: tensor)
    monkeypatch.setattr(torch, "tensor", lambda data, _make=torch.tensor, **options: _make(data))
    rounds = batched.device_merge.merge_rows

    def wrong(rows, lengths, table):
        return rows, lengths

    def broken(rows, lengths, table):
        raise RuntimeError("no driver")

    def right(rows, lengths, table):
        return rounds(rows, lengths, table)

    for kernel, chosen in ((right, right), (wrong, rounds), (None, rounds)):
        monkeypatch.setattr(batched, "triton_merge_rows", lambda kernel=kernel: kernel)
        assert encoder._fastest_merge_rows() is chosen
    monkeypatch.setattr(batched, "triton_merge_rows", lambda: broken)
    with pytest.warns(UserWarning, match="does not run here: no driver"):
        assert encoder._fastest_merge_rows() is rounds


def test_two_words_with_one_hash_are_noticed(monkeypatch):
    from labkit.tokenizer import device_words

    monkeypatch.setattr(device_words, "hash_words", lambda data, starts, stops: torch.zeros_like(starts))
    data = torch.tensor(list(b"abac"), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="same 64-bit hash"):
        device_words.unique_words(data, torch.tensor([0, 2]), torch.tensor([2, 4]))


def test_without_numba_the_python_path_serves(pairs, monkeypatch):
    ours, reference = pairs("smollm2")
    monkeypatch.setattr(native, "_kernels", None)
    monkeypatch.setattr(native, "_failure", "numba could not compile the tokenizer: ImportError")
    text = corpus()[:40_000]
    expected = reference.encode(text, add_special_tokens=False).ids
    assert ours.encode(text) == expected
    assert ours.encode_batch([text, "a"])[0] == expected
    assert "ImportError" in ours.warm_up()


TRITON = """
import torch
from labkit.tokenizer import Tokenizer, bpe, device_merge, merge_table, triton_merge
from pydoc_data.topics import topics
words = sorted({word.encode()[:8] for word in topics["lambda"].split()[:25] + ["aaaaaaaa", "naïve", "日本"]})
tokenizer = bpe.train([topics["lambda"], topics["class"], "aaaaaaaa"], 400).to_tokenizer()
table = device_merge.DeviceTable.build(merge_table.build(tokenizer._words), torch.device("cpu"))
rows = torch.full((len(words), 8), -1, dtype=torch.int32)
for row, word in zip(rows, words):
    row[: len(word)] = table.byte_ids[list(word)]
lengths = torch.tensor([len(word) for word in words])
ours, n_ours = triton_merge.merge_rows(rows, lengths, table)
plain, n_plain = device_merge.merge_rows(rows, lengths, table)
assert torch.equal(ours, plain) and torch.equal(n_ours, n_plain), (ours, plain)
assert int(n_plain.sum()) < int(lengths.sum())
print("equal on", len(words), "words")
"""


def test_the_triton_kernel_in_its_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed here; it is a Linux package")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", TRITON], capture_output=True, text=True, env=environment, timeout=280, check=False
    )
    assert "equal on" in run.stdout, run.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(pairs, expected, name):
    ours, _ = pairs(name)
    assert [row.tolist() for row in ours.encode_batch(documents(), device="cuda")] == expected(name)
