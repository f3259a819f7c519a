"""The file of a draft head: what it says, and what is refused."""

from __future__ import annotations

import pytest
import torch

from labkit import Pipeline, backends
from labkit.decoding import PromptLookup, TrainedHead, compiled_head, draft_head
from labkit.decoding.drafters import choose
from labkit.decoding.trained_head import HEAD_FILE, PlainSteps
from labkit.kvcache.contiguous import ContiguousCache
from labkit.kvcache.none import NoCache
from labkit.perf.timer import NULL_TIMER
from labkit.resources import data_path
from tests.decoding.tiny import tiny


@pytest.fixture(scope="module")
def path(target, head, tmp_path_factory):
    path = tmp_path_factory.mktemp("head") / "head.safetensors"
    known_by = draft_head.fingerprint(draft_head.embeddings(target.transformer, None))
    draft_head.save(head, path, {"steps": 7}, {"name": target.name, "d_model": 32, "fingerprint": known_by})
    return path


def test_it_reads_what_it_wrote(target, head, path):
    found = draft_head.load(path, target)
    hidden, embeddings = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
    outs = [h(hidden, embeddings, NoCache(h.trunk.cache_entries, capacity_tokens=6)) for h in (head, found)]
    torch.testing.assert_close(*outs, atol=0.05, rtol=0.05)  # it is written in bfloat16
    assert torch.equal(found.token_ids, head.token_ids)
    assert torch.equal(found.trunk.embedding.weight, target.transformer.embedding.weight[::2])
    made = Pipeline(target, drafter=TrainedHead(str(path), n_draft=3), backend="reference").generate("abc")
    assert made.token_ids == Pipeline(target, backend="reference").generate("abc").token_ids


def test_one_token_at_a_time_gives_what_all_together_give(head):
    """Training sees whole answers, a run sees tokens one by one: the same head."""
    hidden, embeddings = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    entries = head.trunk.cache_entries
    whole = head(hidden, embeddings, NoCache(entries, capacity_tokens=9))
    cache = ContiguousCache(entries, capacity_tokens=9)
    single = torch.cat([head(hidden[i : i + 1], embeddings[i : i + 1], cache) for i in range(9)])
    torch.testing.assert_close(single, whole, atol=1e-5, rtol=1e-5)


def test_a_head_of_another_model_is_refused(path):
    with pytest.raises(ValueError, match="was trained for tiny-1"):
        draft_head.load(path, tiny(2))


def test_damaged_and_missing_files(target, path, tmp_path):
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated or corrupted"):
        draft_head.load(broken, target)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        Pipeline(target, drafter=TrainedHead(str(tmp_path / "none.safetensors")))


def test_a_lookup_copies_on_past_the_end(target):
    lookup = choose(PromptLookup(shortest=1), target=target).begin(capacity_tokens=99, backend=None)
    options = {"timer": None, "should_stop": None}
    assert lookup.propose([1, 2, 3, 9, 1, 2, 3], 3, None, **options).token_ids == [9, 1, 2]
    assert lookup.propose([1, 2, 3, 9, 1, 2, 3, 9, 7], 3, None, **options).token_ids == []
    assert lookup.propose([1, 2, 3, 9, 1, 2, 3, 9, 7, 7], 4, None, **options).token_ids == [7, 7, 7, 7]


def test_the_head_in_the_box_knows_the_default_model(default_model):
    """Far better than chance on a text that it was not trained on, and the same tokens as without it."""
    path = data_path("draft", HEAD_FILE)
    assert path.stat().st_size < 16e6
    prompt, options = "The old lighthouse keeper climbed the stairs and", {"max_new_tokens": 60, "ignore_eos": True}
    made = Pipeline(default_model, drafter=TrainedHead(str(path), n_draft=2)).generate(prompt, **options)
    assert made.token_ids == Pipeline(default_model).generate(prompt, **options).token_ids
    record = made.trace.meta["speculation"]
    assert record["n_accepted"] > 0.15 * record["n_proposed"] > 3


@pytest.mark.parametrize("n_seen", [1, 5, 20])
def test_the_compiled_step_guesses_what_plain_pytorch_does(target, head, n_seen):
    """Within what one byte a weight loses; a token may be one that the head cannot guess itself (an odd one)."""
    backends.prepare("fused")
    caches = [ContiguousCache(head.trunk.cache_entries, capacity_tokens=64) for _ in range(2)]
    compiled = compiled_head.bind(compiled_head.CompiledHead(head, target), caches[1], "fused")
    assert compiled is not None
    both = PlainSteps(head, target, caches[0]), compiled
    hidden = torch.randn(n_seen, 32, generator=torch.Generator().manual_seed(n_seen))
    how = {"timer": NULL_TIMER, "should_stop": lambda: False}
    for feed in (list(range(n_seen)), [3], [8]):
        if len(feed) == n_seen:
            for steps in both:
                steps.start(hidden)
        plain, ours = (steps(feed, **how) for steps in both)
        assert (plain - ours).abs().max() < 0.03 * plain.abs().max()


def test_other_backends_leave_the_head_to_plain_pytorch(target, head):
    cache = ContiguousCache(head.trunk.cache_entries, capacity_tokens=64)
    assert compiled_head.bind(compiled_head.CompiledHead(head, target), cache, "reference") is None
