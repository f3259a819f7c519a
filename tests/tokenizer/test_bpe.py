"""Learning BPE: training and encoding equal `tokenizers`' trainer, and each step is what the rule says."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from corpus import documents, texts
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from labkit.tokenizer import bpe
from labkit.tokenizer.byte_level import to_symbols

VOCAB_SIZE = 700


@pytest.fixture(scope="module")
def trained():
    lines = documents()[:60] + documents()[-60:]
    reference = Tokenizer(models.BPE())
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    reference.train_from_iterator(lines, trainer)
    return bpe.train(lines, VOCAB_SIZE), reference


def test_training_learns_the_reference_merges(trained):
    ours, reference = trained
    merges = [tuple(m) for m in json.loads(reference.to_str())["model"]["merges"]]
    assert [(to_symbols(m.left), to_symbols(m.right)) for m in ours.merges] == merges
    assert len(merges) == VOCAB_SIZE - bpe.N_BYTES


def test_ids_are_the_reference_ids(trained):
    ours, reference = trained
    fast = ours.to_tokenizer()
    for text in documents()[::40]:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids == fast.encode(text)
        assert ours.decode(ids) == text


def test_sennrichs_example_by_hand():
    # low x5, lower x2, newest x6, widest x3: es 9, then est 9, then lo 7 ("l o" before "o w": the lower pair of ids)
    words = " ".join(["low"] * 5 + ["lower"] * 2 + ["newest"] * 6 + ["widest"] * 3)
    first = bpe.train([words], bpe.N_BYTES + 3, pattern=r"\p{L}+").merges
    assert [(m.left, m.right, m.count) for m in first] == [(b"e", b"s", 9), (b"es", b"t", 9), (b"l", b"o", 7)]


def test_merge_is_left_most_without_overlap():
    assert bpe.merge([7] * 5, (7, 7), 8) == [8, 8, 7]
    assert bpe.merge([], (1, 2), 3) == []
    assert bpe.merge([1, 2, 1, 2], (1, 2), 9) == [9, 9]


@given(texts())
@settings(max_examples=60, deadline=None)
def test_each_step_of_a_trace_is_one_merge_of_the_lowest_rank(text):
    model = _small_model()
    for word in model.words(text):
        steps = model.trace(word)
        assert b"".join(model.tokens[i] for i in steps[0].ids) == word.encode()
        for before, after in pairwise(steps):
            ranks = {m.pair: m.rank for m in model.merges}
            possible = [ranks[pair] for pair in pairwise(before.ids) if pair in ranks]
            assert after.merge.rank == min(possible)
            assert after.ids[after.at] == after.merge.token_id
            assert len(after.ids) == len(before.ids) - 1


@given(texts(), st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_fewer_merges_never_mean_fewer_tokens(text, n):
    model = _small_model()
    lengths = [len(model.encode(text, n_merges=k)) for k in (0, n, 40)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == len(text.encode())


def test_training_stops_when_no_pair_is_left():
    model = bpe.train(["ab"], 1000)
    assert [m.token for m in model.merges] == [b"ab"]


def test_min_count():
    assert bpe.train(["ab ab cd"], 400, min_count=2).merges[0].token == b"ab"
    assert all(m.count >= 2 for m in bpe.train(["ab ab cd"], 400, min_count=2).merges)


def test_special_tokens_come_last():
    model = bpe.train(["ab ab"], 258, special_tokens=["<eot>"])
    assert model.special_tokens == {"<eot>": 257}
    assert model.to_tokenizer().encode("ab<eot>") == [256, 257]
    assert model.decode([256, 257]) == "ab<eot>"


def test_no_room_for_the_bytes():
    with pytest.raises(ValueError, match="vocab_size 100 is too small"):
        bpe.train(["ab"], 100)


def _small_model() -> bpe.BPE:
    if not hasattr(_small_model, "made"):
        _small_model.made = bpe.train(documents()[:20] + documents()[-20:], bpe.N_BYTES + 40)
    return _small_model.made
