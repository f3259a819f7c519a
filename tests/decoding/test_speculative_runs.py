"""Whole runs with a drafter give what the same runs give without one: the oracle is plain decoding."""

from __future__ import annotations

import pytest
import torch

import labkit
from labkit import Pipeline, Sampling, registry
from labkit.decoding import DraftModel, PromptLookup
from labkit.decoding.drafters import Draft
from labkit.decoding.replay import replay, replays
from labkit.kvcache.paged import Paged
from labkit.kvcache.quantized_kinds import Int8
from labkit.kvcache.sliding import Sliding
from labkit.model.watch import look_inside
from labkit.quant.rtn import Int4 as Int4Weights
from tests.decoding.tiny import tiny

PROMPT = "one two one two one two three, one two"
NAMES = [
    "prompt-lookup",
    "draft-model",
    "itself",
    "short-context",
    "rounded",
    "early-exit",
    "trained-head",
    "automatic",
]
CACHES = ["contiguous", "none", Paged(block_size=8), Sliding(window=128)]


def run(model, prompt=PROMPT, *, drafter=None, kv_cache="contiguous", sampling=None, backend="reference", **options):
    pipeline = Pipeline(model, kv_cache=kv_cache, drafter=drafter, sampling=sampling, backend=backend)
    options = {"max_new_tokens": 60, "ignore_eos": True} | options
    return pipeline.generate(prompt, **options)


@pytest.fixture(scope="module")
def plain(target):
    kept = {}

    def of(**options):
        key = repr(sorted(options.items(), key=lambda item: item[0]))
        if key not in kept:
            kept[key] = run(target, **options)
        return kept[key]

    return of


CASES = [(name, "contiguous") for name in NAMES]
CASES += [(name, cache) for cache in CACHES[1:] for name in ("itself", "prompt-lookup", "trained-head")]


@pytest.mark.parametrize(("name", "kv_cache"), CASES, ids=str)
def test_greedy_text_is_that_of_plain_decoding(target, drafters, plain, name, kv_cache):
    made = run(target, drafter=drafters[name], kv_cache=kv_cache)
    assert made.token_ids == plain(kv_cache=kv_cache).token_ids
    record = made.trace.meta["speculation"]
    assert sum(r["n_accepted"] + 1 for r in record["rounds"]) == 59  # the first token is the prefill's
    if name == "itself":
        assert record["n_accepted"] == record["n_proposed"] > 40


def test_every_registered_lossless_cache_was_tried():
    tried = {c if isinstance(c, str) else type(c).__name__.lower() for c in CACHES}
    lossless = {
        info.name
        for info in labkit.components("kv_cache")
        if info.name not in ("int8", "int4") and not info.unavailable
    }
    assert lossless == tried


@pytest.mark.parametrize("weights", ["int8", Int4Weights(group_size=32)], ids=["int8", "int4"])
@pytest.mark.parametrize("name", ["itself", "early-exit", "prompt-lookup"])
def test_packed_weights(drafters, name, weights):
    component, config = registry.find("weights", weights)
    model = tiny(1)
    model.transformer = component.build(config, transformer=model.transformer)
    drafter = DraftModel(model=model, n_draft=4) if name == "itself" else drafters[name]
    assert run(model, drafter=drafter).token_ids == run(model).token_ids


@pytest.mark.parametrize("name", NAMES)
def test_the_repetition_penalty_remembers_what_was_accepted_and_nothing_else(target, drafters, plain, name):
    sampling = Sampling(repetition_penalty=1.4)
    assert run(target, drafter=drafters[name], sampling=sampling).token_ids == plain(sampling=sampling).token_ids


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7, top_k=40), Sampling(1.2, repetition_penalty=1.2)])
def test_guesses_that_are_not_drawn_leave_even_the_draws_as_they_were(target, drafters, plain, sampling):
    made = run(target, drafter=drafters["prompt-lookup"], sampling=sampling)
    assert made.token_ids == plain(sampling=sampling).token_ids


class Knows:
    """Guesses what it was told, wherever the text stands; ``before`` is called first."""

    name, nbytes, wants_hidden = "knows", 0, False

    def __init__(self, n_prompt, answer, n_draft=6, before=lambda: None):
        self.n_prompt, self.answer, self.n_draft, self.before = n_prompt, answer, n_draft, before

    def begin(self, *, capacity_tokens, backend):
        return self

    def propose(self, token_ids, n, sampler, *, timer, should_stop):
        self.before()
        at = len(token_ids) - self.n_prompt
        return Draft(self.answer[at : at + n])


@pytest.fixture(scope="module")
def knows(target, plain):
    """Every guess is right: whole rounds are accepted."""
    return Knows(len(target.tokenizer.encode(PROMPT)), plain().token_ids)


def test_the_end_of_text_inside_a_draft(target, plain, knows, monkeypatch):
    ids = plain().token_ids
    eos = ids[9]
    monkeypatch.setattr(target.tokenizer, "eos_ids", frozenset([eos]))
    made = run(target, drafter=knows, ignore_eos=False)
    alone = run(target, ignore_eos=False)
    assert made.finish_reason == "stop" == alone.finish_reason
    assert made.token_ids == alone.token_ids == ids[: ids.index(eos) + 1]
    assert made.text == alone.text


def test_a_stop_string_across_two_rounds(target, plain, knows):
    text = plain().text
    for at in (4, 11, 17):
        stop = [text[at : at + 4]]
        made, alone = run(target, drafter=knows, stop=stop), run(target, stop=stop)
        assert (made.text, made.token_ids, made.finish_reason) == (alone.text, alone.token_ids, "stop")


@pytest.mark.parametrize("n_new", [1, 2, 3, 7, 60])
def test_no_token_too_many(target, plain, knows, n_new):
    made = run(target, drafter=knows, max_new_tokens=n_new)
    assert made.token_ids == plain().token_ids[:n_new]
    assert made.finish_reason == "length"


def test_up_to_the_end_of_the_context(target, drafters):
    prompt = (PROMPT * 5)[:180]
    alone = run(target, prompt, max_new_tokens=100)
    assert 10 < len(alone.token_ids) < 100  # the context ends first
    for name in NAMES:
        assert run(target, prompt, drafter=drafters[name], max_new_tokens=100).token_ids == alone.token_ids


def test_a_run_that_is_stopped_while_it_drafts(target, plain, knows):
    runs = []
    stops = Knows(knows.n_prompt, knows.answer, before=lambda: runs[0].stop() if runs else None)
    pipeline = Pipeline(target, drafter=stops, backend="reference")
    runs.append(pipeline.run(PROMPT, max_new_tokens=60, ignore_eos=True))
    stopped = runs.pop().result(timeout=30)
    assert stopped.finish_reason in ("cancelled", "length")
    assert stopped.token_ids == plain().token_ids[: len(stopped.token_ids)]
    assert pipeline.generate(PROMPT, max_new_tokens=60, ignore_eos=True).token_ids == plain().token_ids


def test_guesses_take_spare_room_only(target, plain, knows):
    """A pool of blocks that the text itself fills: where a guess does not fit, the round goes without."""
    n_tokens = knows.n_prompt + 60
    pool = Paged(block_size=8, n_blocks=-(-n_tokens // 8))
    assert run(target, drafter=knows, kv_cache=pool).token_ids == plain().token_ids


def test_a_cache_that_rounds_says_what_a_draft_may_change(target, drafters):
    made = run(target, drafter=drafters["itself"], kv_cache="int8")
    assert "some tokens earlier" in made.trace.meta["drafter_note"]
    assert made.trace.meta["speculation"]["n_accepted"] > 30
    made = run(target, drafter=drafters["itself"], kv_cache=Int8(recent=0))
    assert "nothing is guessed" in made.trace.meta["drafter_note"]
    assert made.trace.meta["speculation"]["n_proposed"] == 0


def test_phases_and_tokens_that_come_together(target, knows):
    trace = run(target, drafter=knows).trace
    decode = trace.stage_phases("decode")
    assert {"draft", "verify", "sample"} <= set(decode)
    assert not {"attention", "ffn", "norm", "lm_head"} & set(decode)  # they are inside verify
    rounds = trace.meta["speculation"]["rounds"]
    assert len(trace.round_s) == len(rounds) < len(trace.itl_s) == 59
    assert sum(trace.paced_s) == pytest.approx(sum(trace.itl_s))
    figures = trace.summary()
    assert figures["tokens_per_round"] == pytest.approx(59 / len(rounds))
    assert figures["itl_median_ms"] > 0


class Records:
    """Guesses what it was told, half of it wrong, and keeps what hidden states it is shown."""

    name, nbytes, wants_hidden, n_draft = "records", 0, True, 4

    def __init__(self, n_prompt, answer):
        self.n_prompt, self.answer, self.seen = n_prompt, answer, []

    def begin(self, *, capacity_tokens, backend):
        return self

    def propose(self, token_ids, n, sampler, *, timer, should_stop):
        at = len(token_ids) - self.n_prompt
        guesses = self.answer[at : at + n]
        if at % 2 and len(guesses) > 2:
            guesses[2] = (guesses[2] + 1) % 300
        return Draft(guesses)

    def see(self, hidden):
        self.seen.append(hidden)


@pytest.mark.parametrize("kv_cache", ["contiguous", "none"])
def test_a_drafter_sees_the_state_behind_every_token_that_stays(target, plain, kv_cache):
    answer = plain().token_ids
    prompt_ids = target.tokenizer.encode(PROMPT)
    drafter = Records(len(prompt_ids), answer)
    assert run(target, drafter=drafter, kv_cache=kv_cache).token_ids == answer
    states = look_inside(target, [*prompt_ids, *answer[:-1]]).hidden[-1]
    seen = torch.cat(drafter.seen)
    assert seen.shape[0] >= len(answer) - 1
    torch.testing.assert_close(
        seen[: len(answer) - 1], states[len(prompt_ids) - 1 :][: len(answer) - 1], atol=1e-4, rtol=1e-4
    )


def test_vocabularies_must_be_the_same(target):
    with pytest.raises(ValueError, match="same vocabulary"):
        Pipeline(target, drafter=DraftModel(model=tiny(1, n_vocab=320)))
    with pytest.raises(ValueError, match="needs a model"):
        Pipeline(target, drafter="draft-model")
    with pytest.raises(ValueError, match=r"unknown drafter 'no'.*prompt-lookup"):
        Pipeline(target, drafter="no")


@pytest.mark.parametrize("n_draft", [1, 3, 8])
@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.8, top_k=20)])
def test_a_replay_takes_the_rounds_that_the_run_takes(target, n_draft, sampling):
    lookup = PromptLookup(n_draft=n_draft)
    plain, drafted = (run(target, drafter=drafter, sampling=sampling, seed=3) for drafter in (None, lookup))
    ids = [*plain.prompt_ids, *plain.token_ids]
    (found,) = replay(target, ids, len(plain.prompt_ids), lookup)
    assert list(found.rounds) == rounds_of(drafted)


@pytest.mark.parametrize("name", ["trained-head", "early-exit", "draft-model"])
def test_a_replay_of_computed_guesses_takes_them_too(target, drafters, plain, name):
    drafted = run(target, drafter=drafters[name])
    ids = [*plain().prompt_ids, *plain().token_ids]
    (found,) = replay(target, ids, len(plain().prompt_ids), drafters[name])
    assert list(found.rounds) == rounds_of(drafted)


def test_what_a_model_lacks_is_left_out_of_the_replays(target):
    plain = run(target)
    ids = [*plain.prompt_ids, *plain.token_ids]
    found = replays(target, ids, len(plain.prompt_ids))
    assert {r.drafter for r in found} == {"prompt-lookup"}  # nobody trained a head for this model
    assert not replays(target, ids, len(plain.prompt_ids), should_stop=lambda: True)


def rounds_of(completion):
    rounds = completion.trace.meta["speculation"]["rounds"]
    return [(len(r["proposed"]), r["n_accepted"] + 1) for r in rounds]


def test_a_completion_says_what_the_model_read(target):
    assert run(target).prompt_ids == tuple(target.tokenizer.encode_prompt(PROMPT))
