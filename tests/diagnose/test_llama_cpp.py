"""A real server: llama.cpp's own, in a process of its own, with the default model. Structure, not speed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit import diagnose
from labkit.checkpoint.fetch import cached_path

HERE = Path(__file__).resolve().parent
START_S = 240

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp has no wheel for this platform"
    ),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def url():
    model = cached_path()
    if model is None:
        pytest.skip("the default model is not in the cache, and there is no network to fetch it")
    worker = [sys.executable, str(HERE / "llama_cpp_worker.py"), str(model)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          env=environment) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        address = next((line.split()[1] for line in process.stdout if line.startswith("listening ")), None)
        assert address, f"the server ended with {process.wait()}"
        yield address
        process.stdin.close()  # the worker ends when nobody holds its input any more
        process.wait(30)


@pytest.fixture(scope="module")
def report(url):
    workload = diagnose.Workload(n_prompt_tokens=16, n_new_tokens=8, concurrency=2)
    return diagnose.probe(url, workload=workload, budget="small", announce=lambda _: None)


def test_it_is_found_and_every_stream_is_read(report):
    assert "llamacpp" in report.who
    assert all(stream.complete for stream in report.streams)
    assert all(stream.usage.prompt_tokens and stream.timings["predicted_n"] for stream in report.streams)


def test_its_tokens_are_ours(report):
    """What the server counted is what was read, but for an end token that has no event."""
    for stream in report.streams:
        assert abs(len(stream.tokens) - stream.timings["predicted_n"]) <= 1
        assert len(stream.tokens) == stream.usage.completion_tokens


def test_both_clocks_meet(report):
    """Its prefill lies inside our wait for the first token; its decode is no longer than the stream was in all."""
    for stream in report.streams:
        assert stream.timings["prompt_ms"] / 1e3 <= stream.recording.end_s
        assert (stream.timings["prompt_ms"] + stream.timings["predicted_ms"]) / 1e3 <= 1.02 * stream.recording.end_s
    fall = report.waterfall()
    assert {bar.who for bar in fall.bars} == {"client", "server"}
    assert report.server_means, "the server was started with its metrics on"


def test_a_repeated_prompt_is_cached(report):
    again = [s for s in report.streams if s.recording.meta["probe"] == "repeat" and s.recording.meta["nth"]]
    assert all((stream.cached_tokens or 0) > 0.5 * (stream.usage.prompt_tokens or 0) for stream in again)


def test_the_verdict_is_one_of_ours_and_replays(report):
    again = diagnose.replay(report.to_json())
    assert again.verdict.cause == report.verdict.cause
    assert report.verdict.evidence
    assert report.verdict.next_steps
