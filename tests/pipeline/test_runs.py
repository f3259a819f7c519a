"""The pipeline on a tiny random model that speaks bytes: streaming, stopping, errors, and what the trace holds."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

import labkit
from labkit.engine import Engine
from labkit.model import Model
from labkit.pipeline import PREFILL_CHUNK_TOKENS, Pipeline

CONTEXT = 200


def greedy(model: Model, prompt: str, n_new: int) -> list[int]:
    """The definition: the whole text through the model, once for each token."""
    ids = model.tokenizer.encode(prompt)
    n_prompt = len(ids)
    for _ in range(n_new):
        ids.append(int(model(ids)[-1].argmax()))
    return ids[n_prompt:]


def raise_at(n_tokens: int, error: BaseException):
    """A greedy sampler that raises ``error`` instead of its n-th token, as Ctrl-C would."""
    made = iter(range(n_tokens))

    def sample(sampler, logits) -> int:
        if next(made, None) is None:
            raise error
        return int(logits.argmax())

    return sample


# --- what it generates


def test_greedy_equals_the_definition(model, pipeline):
    done = pipeline.generate("Hello", max_new_tokens=12, ignore_eos=True)
    assert done.token_ids == greedy(model, "Hello", 12)
    assert done.finish_reason == "length"
    assert done.text == model.tokenizer.decode(done.token_ids)


@pytest.mark.parametrize("sampling", [None, labkit.Sampling(temperature=1.0, top_k=50)])
def test_run_equals_generate(model, sampling):
    pipeline = Pipeline(model, sampling=sampling)
    run = pipeline.run("Hello", max_new_tokens=20, seed=3)
    pieces = list(run)
    done = run.result()
    again = pipeline.generate("Hello", max_new_tokens=20, seed=3)
    assert (done.text, done.token_ids, done.finish_reason) == (again.text, again.token_ids, again.finish_reason)
    assert "".join(pieces) == done.text == run.text
    assert list(run) == []  # read once; a second reader does not hang
    assert not run.running


def test_a_prompt_in_chunks_equals_the_whole(model, pipeline, monkeypatch):
    want = pipeline.generate("a rather longer prompt", max_new_tokens=8)
    monkeypatch.setitem(PREFILL_CHUNK_TOKENS, "cpu", 5)
    got = pipeline.generate("a rather longer prompt", max_new_tokens=8)
    assert got.token_ids == want.token_ids
    assert got.trace.steps[0].n_tokens == want.trace.steps[0].n_tokens == len("a rather longer prompt")


@pytest.mark.parametrize("kv_cache", ["none", "contiguous"])
def test_each_step_costs_what_its_cache_says(model, kv_cache):
    done = Pipeline(model, kv_cache=kv_cache, backend="reference").generate("Hello", max_new_tokens=5, ignore_eos=True)
    n_tokens = [step.n_tokens for step in done.trace.steps]
    assert n_tokens == ([5, 6, 7, 8, 9] if kv_cache == "none" else [5, 1, 1, 1, 1])


def test_generation_ends_where_the_context_does(model, pipeline):
    prompt = "x" * (CONTEXT - 3)
    done = pipeline.generate(prompt, max_new_tokens=50, ignore_eos=True)
    assert len(done.token_ids) == 4  # three fit behind the prompt, and the last needs no room
    assert done.finish_reason == "length"
    assert done.token_ids[:3] == greedy(model, prompt, 3)


def test_one_new_token_is_a_prefill_and_nothing_else(pipeline):
    trace = pipeline.generate("Hello", max_new_tokens=1).trace
    assert [step.stage for step in trace.steps] == ["prefill"]
    assert trace.itl_s == []
    assert trace.ttft_s == pytest.approx(trace.wall_s, abs=0.5)


def test_the_end_of_text_ends_it_and_is_not_shown(model, pipeline, monkeypatch):
    ids = pipeline.generate("Hello", max_new_tokens=10, ignore_eos=True).token_ids
    at = next(i for i in range(1, 10) if ids[i] not in ids[:i])
    monkeypatch.setattr(model.tokenizer, "eos_ids", frozenset({ids[at]}))
    done = pipeline.generate("Hello", max_new_tokens=10)
    assert (done.finish_reason, done.token_ids) == ("stop", ids[: at + 1])
    assert done.text == model.tokenizer.decode(ids[:at])
    assert pipeline.generate("Hello", max_new_tokens=10, ignore_eos=True).token_ids == ids


def test_stop_strings_are_cut_off_and_never_shown(model, pipeline, monkeypatch):
    said = "one two three. Four five."
    letters = iter(model.tokenizer.encode(said))
    monkeypatch.setattr("labkit.decoding.sampler.Sampler.__call__", lambda sampler, logits: next(letters))
    run = pipeline.run("Hello", max_new_tokens=100, stop=["zebra", "ee. F"])
    assert "".join(run) == "one two thr"
    done = run.result()
    assert (done.text, done.finish_reason) == ("one two thr", "stop")
    assert len(done.token_ids) == len("one two three. F")


def test_text_held_back_for_a_stop_string_comes_at_the_end(model, pipeline, monkeypatch):
    letters = iter(model.tokenizer.encode("almost EN"))
    monkeypatch.setattr("labkit.decoding.sampler.Sampler.__call__", lambda sampler, logits: next(letters))
    done = pipeline.generate("Hello", max_new_tokens=9, stop=["END"])
    assert (done.text, done.finish_reason) == ("almost EN", "length")


def test_characters_arrive_whole(model, pipeline, monkeypatch):
    said = "día 🦜!"
    letters = iter(model.tokenizer.encode(said))
    monkeypatch.setattr("labkit.decoding.sampler.Sampler.__call__", lambda sampler, logits: next(letters))
    pieces = list(pipeline.run("Hello", max_new_tokens=len(said.encode())))
    assert "".join(pieces) == said
    assert "🦜" in pieces


# --- stopping it


def test_stop_ends_a_run_early_and_keeps_what_it_said(pipeline):
    run = pipeline.run("Hello", max_new_tokens=190, ignore_eos=True)
    pieces = iter(run)
    next(pieces)
    run.stop()
    rest = list(pieces)
    done = run.result(timeout=30)
    assert done.finish_reason == "cancelled"
    assert 1 <= len(done.token_ids) < 190
    assert done.text.endswith("".join(rest))
    assert done.trace.meta["finish_reason"] == "cancelled"


def test_a_run_can_be_stopped_before_its_first_token(pipeline, monkeypatch):
    gate = threading.Event()
    bind = Engine._bind_cache

    def slow(*arguments):
        gate.wait(30)
        return bind(*arguments)

    monkeypatch.setattr(Engine, "_bind_cache", slow)
    run = pipeline.run("Hello", max_new_tokens=50)
    run.stop()
    gate.set()
    done = run.result(timeout=30)
    assert (done.text, done.token_ids, done.finish_reason) == ("", [], "cancelled")
    assert done.trace.ttft_s is None
    assert done.trace.summary()["ttft_ms"] is None


def test_leaving_the_loop_stops_the_run(pipeline):
    run = pipeline.run("Hello", max_new_tokens=190, ignore_eos=True)
    pieces = iter(run)
    next(pieces)
    pieces.close()  # what `break` does to a generator
    assert run.result(timeout=30).finish_reason in ("cancelled", "length")


def test_ctrl_c_in_the_middle_and_the_next_run_is_clean(model, pipeline, monkeypatch):
    want = greedy(model, "Hello", 10)
    with monkeypatch.context() as patch:
        patch.setattr("labkit.decoding.sampler.Sampler.__call__", raise_at(4, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            pipeline.generate("Hello", max_new_tokens=10, ignore_eos=True)
    assert pipeline.generate("Hello", max_new_tokens=10, ignore_eos=True).token_ids == want


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send to one process")
def test_ctrl_c_does_not_wait_for_the_step_that_is_under_way(pipeline, monkeypatch):
    """A compiled step ignores interrupts until it returns; the run is told to stop at once all the same."""
    told = threading.Event()

    def work(engine, sequence):
        interrupter.start()
        if sequence.stop_event.wait(20):
            told.set()

    interrupter = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    monkeypatch.setattr("labkit.pipeline.loop", work)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            pipeline.generate("Hello", max_new_tokens=10)
    finally:
        signal.signal(signal.SIGINT, before)
    assert told.wait(20)


def test_what_the_worker_raises_reaches_the_reader(pipeline, monkeypatch):
    monkeypatch.setattr("labkit.decoding.sampler.Sampler.__call__", raise_at(3, ValueError("broken")))
    run = pipeline.run("Hello", max_new_tokens=10, ignore_eos=True)
    with pytest.raises(ValueError, match="broken"):
        list(run)
    with pytest.raises(ValueError, match="broken"):
        run.result()
    assert len(run.snapshot().token_s) == 3


def test_waiting_too_long_says_so(pipeline, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(Engine, "_forward", lambda engine, feeds, stop: gate.wait(30) and None)
    run = pipeline.run("Hello")
    with pytest.raises(TimeoutError, match=r"still going after 0\.01 s; stop\(\) ends it"):
        run.result(timeout=0.01)
    assert run.running
    gate.set()
    with pytest.raises(TypeError):
        run.result(timeout=30)


def test_two_runs_at_once_do_not_mix(model):
    pipeline = Pipeline(model, sampling=labkit.Sampling(temperature=1.0))
    want = [pipeline.generate("Hello", max_new_tokens=30, seed=s, ignore_eos=True).token_ids for s in (1, 2)]
    runs = [pipeline.run("Hello", max_new_tokens=30, seed=s, ignore_eos=True) for s in (1, 2)]
    assert [run.result(timeout=60).token_ids for run in runs] == want


# --- what it measures


def test_the_trace_adds_up(model, pipeline):
    done = pipeline.generate("Hello there", max_new_tokens=16, ignore_eos=True)
    trace = done.trace
    assert [step.stage for step in trace.steps] == ["prefill"] + ["decode"] * 15
    assert len(trace.token_s) == 16
    assert len(trace.itl_s) == 15
    assert sum(trace.itl_s) + trace.ttft_s == pytest.approx(trace.token_s[-1])
    assert trace.token_s[-1] <= trace.wall_s
    assert sum(trace.phases.values()) <= trace.wall_s * (1 + 1e-6)
    assert sum(trace.stage_s(stage) for stage in ("prefill", "decode")) <= trace.wall_s
    for step in trace.steps:
        assert sum(step.phases.values()) <= step.end_s - step.start_s + 1e-6
    assert {"tokenize", "embed", "attention", "ffn", "norm", "lm_head", "sample", "kv_cache", "detokenize"} <= set(
        trace.phases
    )
    assert "tokenize" not in trace.stage_phases("decode")
    assert 0.5 < trace.coverage <= 1


def test_the_trace_says_what_ran(model):
    sampling = labkit.Sampling(temperature=0.7, top_p=0.9)
    trace = Pipeline(model, sampling=sampling, backend="reference").generate("Hello", max_new_tokens=4, seed=9).trace
    meta = trace.meta
    assert (meta["model"], meta["dtype"], meta["device"], meta["backend"]) == ("tiny", "fp32", "cpu", "reference")
    assert (meta["kv_cache"], meta["seed"]) == ("contiguous", 9)
    assert (meta["sampling"]["temperature"], meta["sampling"]["top_p"]) == (0.7, 0.9)
    assert meta["weights_bytes"] == model.nbytes
    assert meta["kv_cache_bytes"] == 3 * 2 * 2 * 8 * (5 + 4 - 1) * 4  # layers, k and v, heads, width, tokens, fp32


def test_a_trace_of_a_real_run_survives_its_files(pipeline, tmp_path):
    trace = pipeline.generate("Hello", max_new_tokens=6).trace
    assert labkit.Trace.from_json(trace.to_json()) == trace
    assert trace.to_chrome(tmp_path / "t.json").stat().st_size > 0
    assert trace.to_dataframe()["duration_ms"].sum() == pytest.approx(sum(trace.phases.values()) * 1e3, rel=1e-6)


def test_a_snapshot_during_the_run(pipeline):
    run = pipeline.run("Hello", max_new_tokens=150, ignore_eos=True)
    pieces = iter(run)
    next(pieces)
    live = run.snapshot()
    assert live.ttft_s is not None
    assert live.wall_s > 0
    assert 0 <= live.coverage <= 1
    run.stop()
    assert run.result(timeout=30).trace.n_tokens >= live.n_tokens
