"""A server in a pipeline's place: the door of this process, and llama.cpp's own."""

from __future__ import annotations

import pytest

import labkit
from labkit.diagnose.endpoint import ServerError
from labkit.pipeline import Pipeline
from tests.diagnose.test_llama_cpp import pytestmark as needs_llama_cpp
from tests.diagnose.test_llama_cpp import url as llama_cpp  # noqa: F401 - a fixture
from tests.serving.test_http import KEY, service, url  # noqa: F401 - fixtures


@pytest.fixture
def remote(url):  # noqa: F811
    return labkit.Remote(url, api_key=KEY)


@pytest.mark.parametrize("chat", [False, True])
def test_it_says_what_the_pipeline_says(remote, model, chat):
    options = {"max_new_tokens": 10, "chat": chat, "ignore_eos": True}
    run = remote.run("Hello", **options)
    pieces = list(run)
    want = Pipeline(model, backend="reference").generate("Hello", **options)
    done = run.result(10)
    assert "".join(pieces) == done.text == want.text
    assert (done.finish_reason, done.trace.n_tokens) == ("length", 10)
    assert done.trace.n_prompt_tokens == want.trace.n_prompt_tokens


def test_what_the_server_reveals_is_in_the_trace(remote):
    trace = remote.generate("Hello", max_new_tokens=6, ignore_eos=True).trace
    assert [step.stage for step in trace.steps] == ["prefill"] + ["decode"] * 5
    assert {"attention", "ffn", "norm", "sample"} <= set(trace.stage_phases("prefill"))
    assert {"attention", "ffn"} <= set(trace.stage_phases("decode"))
    assert trace.meta["timed_by"] == "the client"
    assert trace.meta["server_timings"]["predicted_n"] == 6
    assert 0 < trace.ttft_s <= trace.token_s[-1] <= trace.wall_s
    assert labkit.Trace.from_json(trace.to_json()) == trace


def test_sampling_and_stop_reach_the_server(url, model):  # noqa: F811
    warm = labkit.Sampling(temperature=1.0, top_k=20)
    want = Pipeline(model, backend="reference", sampling=warm)
    text = want.generate("Hello", max_new_tokens=10, seed=5, ignore_eos=True).text
    remote = labkit.Remote(url, api_key=KEY, sampling=warm)
    assert remote.generate("Hello", max_new_tokens=10, seed=5, ignore_eos=True).text == text
    cut = remote.generate("Hello", max_new_tokens=10, seed=5, ignore_eos=True, stop=[text[3:5]])
    assert (cut.text, cut.finish_reason) == (text[: text.find(text[3:5])], "stop")


def test_stop_ends_the_request_at_the_server(remote, service):  # noqa: F811
    run = remote.run("Hello", max_new_tokens=190, ignore_eos=True)
    next(iter(run))
    run.stop()
    assert run.result(20).finish_reason == "cancelled"


def test_what_goes_wrong_is_a_sentence(url):  # noqa: F811
    with pytest.raises(ServerError, match=r"401|key"):
        labkit.Remote(url, api_key="wrong")
    with pytest.raises(ServerError):
        labkit.Remote("http://127.0.0.1:9")
    with pytest.raises(ServerError, match="300 tokens"):
        labkit.Remote(url, api_key=KEY).generate("x" * 300)
    with pytest.raises(ValueError, match="the prompt is empty"):
        labkit.Remote(url, api_key=KEY).run("")


@needs_llama_cpp[0]
@needs_llama_cpp[1]
def test_against_llama_cpp(llama_cpp):  # noqa: F811
    done = labkit.Remote(llama_cpp).generate("Once upon a time", max_new_tokens=8, ignore_eos=True)
    assert done.finish_reason == "length"
    assert done.trace.n_tokens == done.trace.meta["server_timings"]["predicted_n"] == 8
    assert done.text.strip()
    assert done.trace.meta["server_timings"]["prompt_ms"] / 1e3 <= done.trace.wall_s
