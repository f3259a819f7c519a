"""From an address to a report: over real HTTP to the mock, whose truth is known; and what may be there instead."""

from __future__ import annotations

import json
import time
from html import escape
from html.parser import HTMLParser

import pytest

from labkit import diagnose
from labkit.cli import main
from labkit.diagnose import server_side
from labkit.diagnose.client import Client
from labkit.diagnose.conventions import CONVENTIONS, rows
from labkit.diagnose.dialects import Ask
from labkit.diagnose.endpoint import ServerError, find_endpoint
from labkit.diagnose.loopback import LoopbackServer
from labkit.diagnose.probes import BUDGETS, Workload, plan
from labkit.diagnose.quirks import Quirks
from labkit.diagnose.simulated import SimulatedServer
from labkit.diagnose.stream import read_stream
from labkit.diagnose.waterfall import waterfall
from tests.diagnose.scripted import OK, answer, scripted
from tests.diagnose.test_stream import chunk, sse

SMALL = Workload(24, 8, 2)


@pytest.fixture(scope="module")
def report():
    """A small probe over HTTP, and what it said that it would send."""
    said: list[str] = []
    quirks = Quirks(
        decode_s=0.003, prefill_tok_s=3000, says_timings=True, prefix_cache=True, line_end="\r\n", split=True
    )
    with LoopbackServer(quirks) as server:
        found = diagnose.probe(server.url, workload=SMALL, budget="small", announce=said.append)
        n_jobs, n_words = len(server.jobs), sum(len(job.words) for job in server.jobs)
    return found, said, n_jobs, n_words


def test_the_load_is_said_before_and_kept(report):
    found, (said,), n_jobs, n_words = report
    planned = plan(SMALL, budget="small")
    assert f"At most {n_jobs} requests to http://127.0.0.1" in said
    assert n_jobs == planned.n_requests == len(found.streams)
    assert n_words <= sum(wave.n_prompt for wave in planned.waves)


def test_both_clocks_meet(report):
    found, *_ = report
    fall = found.waterfall()
    assert {bar.who for bar in fall.bars} == {"client", "server"}
    assert fall.outside_s is not None
    assert {"queue_s", "prefill_s", "decode_s"} <= set(found.server_means)


def test_the_report_is_a_page_and_a_file(report, tmp_path):
    found, *_ = report
    html = found.to_html()
    HTMLParser().feed(html)
    assert "http" not in html.replace(found.where, "").replace("http://127.0.0.1", "")  # nothing from elsewhere
    assert "<script" not in html
    for row in found.figures():
        assert escape(row["what"]) in html
    again = diagnose.replay(found.save(tmp_path / "run.json"))
    assert [f.cause for f in again.findings] == [f.cause for f in found.findings]
    assert again.measured.prefill == found.measured.prefill
    assert len(again.percentiles()) == len(found.percentiles())


def test_what_a_server_writes_is_never_markup():
    wave = SimulatedServer(Quirks(error_after=1)).record(Ask("x", 4))
    evil = json.loads(json.dumps(wave.to_dict()).replace("told to", "<img src=x onerror=alert(1)>"))
    html = diagnose.replay(json.dumps({"format": "labkit-recording-1", "recordings": [evil]})).to_html()
    assert "<img" not in html


def test_every_convention_by_hand():
    """Role chunk at 0.1, then events of 1, 1 and 4 tokens at 0.2, 0.3 and 0.5, the end at 0.6 s."""
    counted = [chunk(text, usage={"completion_tokens": n}) for text, n in (("a", 1), ("b", 2))]
    stream = read_stream(sse(chunk("", role=True), *counted, ": ping", chunk("cdef", usage={"completion_tokens": 6}),
                             chunk(finish="stop"), "[DONE]"))  # fmt: skip
    table = {row["tool"]: row for row in rows(stream)}
    assert len(table) == len(CONVENTIONS)
    expected = {  # TTFT, mean ITL, TPOT in ms
        "vllm bench serve": (100, 125, 100),  # gaps 100, 100, 200, 100; (600 - 100) / 5
        "guidellm": (200, 60, 500 / 6),
        "AIPerf": (200, 60, None),
        "inference-perf": (200, 60, 60),
        "llmperf": (200, 500 / 6, None),
        "TGI (its log)": (None, None, 500 / 6),
        "labkit": (200, 60, 60),
    }
    for tool, figures in expected.items():
        found = [table[tool][name] for name in ("TTFT ms", "ITL mean ms", "TPOT ms")]
        assert found == [value if value is None else pytest.approx(value) for value in figures], tool
    assert table["inference-perf"]["ITL p99 ms"] == pytest.approx(200, rel=0.05)
    assert table["labkit"]["ITL p99 ms"] == pytest.approx(100, rel=0.05)


def test_the_waterfall_by_hand():
    timings = {"prompt_ms": 60.0, "predicted_ms": 200.0, "queue_ms": 30.0, "predicted_n": 3, "prompt_n": 10}
    stream = read_stream(sse(chunk("a"), chunk("b"), chunk("c"), {"choices": [], "timings": timings}, "[DONE]"))
    fall = waterfall(stream)
    assert [(bar.what, round(bar.start_s, 3), round(bar.end_s, 3)) for bar in fall.bars if bar.who == "server"] == [
        ("decode", 0.1, 0.3), ("prefill", 0.04, 0.1), ("queue", 0.01, 0.04)
    ]  # fmt: skip
    assert fall.outside_s == pytest.approx(0.01)
    assert fall.decode_ratio == pytest.approx(1.0)


def test_a_model_without_a_chat_template_is_measured_all_the_same():
    said: list[str] = []
    with LoopbackServer(Quirks(dialect="openai-completions", decode_s=0.002, cold_s=0.0)) as server:
        found = diagnose.probe(server.url, workload=SMALL, budget="small", announce=said.append)
        with pytest.raises(ServerError, match="chat template"):
            diagnose.probe(server.url + "/v1/chat/completions", workload=SMALL, announce=said.append)
    assert found.where == f"{server.url}/v1/completions"
    assert any("no chat template" in note for note in found.notes)
    assert all(stream.complete for stream in found.streams)
    assert "/v1/chat/completions" in said[0]
    assert "no chat" in said[1]
    assert "/v1/completions" in said[2]


@pytest.mark.parametrize("dialect", ["openai-completions", "tgi", "triton"])
def test_other_dialects_over_http(dialect):
    with LoopbackServer(Quirks(dialect=dialect, decode_s=0.002, ping_s=0.05, cold_s=0.2)) as server:
        endpoint = find_endpoint(
            server.url, dialect="auto" if dialect != "openai-completions" else dialect, model="mock"
        )
        with Client(endpoint) as client:
            found = read_stream(client.record(Ask("word " * 30, 12)))
        assert (endpoint.dialect, len(found.tokens), found.complete) == (dialect, 12, True)
        for _ in range(100):  # the server notes what it sent after the client has read it
            if server.truths:
                break
            time.sleep(0.05)
        assert found.text == server.truths[0].text


def test_a_dropped_connection_and_an_error_over_http():
    for quirks, words in ((Quirks(drop_after=3), "broke off"), (Quirks(error_after=3), "told to")):
        with LoopbackServer(quirks) as server, Client(find_endpoint(server.url)) as client:
            found = read_stream(client.record(Ask("x", 9)))
        assert len(found.tokens) == 3
        assert words in (found.error or "")


def test_a_model_that_stops_at_once():
    found = diagnose.probe_target(SimulatedServer(Quirks(stops_after=1)), budget="small")
    assert found.verdict.cause == "unknown"
    assert "No pace" in " ".join(found.verdict.evidence)


def test_a_server_that_only_fails():
    with scripted([answer(500, b"boom")]) as (url, requests), pytest.raises(ServerError, match="its own log"):
        diagnose.probe(url + "/v1/chat/completions", model="m", announce=lambda _: None)
    posts = [request for request in requests if request.startswith(b"POST")]
    assert len(posts) == 1  # a server that fails is not loaded further


def test_too_many_requests_end_the_probe():
    calm = [OK, b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}\n\n']
    busy = [answer(429, b"slow down")]
    nothing = [answer(404, b"")]
    with scripted(nothing, nothing, nothing, calm, calm, busy) as (url, requests):
        found = diagnose.probe(url + "/v1/chat/completions", model="m", budget="small", announce=lambda _: None)
    assert any("429" in note for note in found.notes)
    assert sum(request.startswith(b"POST") for request in requests) == 3


def test_the_budget_is_kept():
    slow = SimulatedServer(Quirks(prefill_tok_s=30, decode_s=0.5))
    found = diagnose.probe_target(slow, budget="small")
    assert slow.now_s < BUDGETS["small"].max_s * 1.5
    assert any("left out" in note for note in found.notes)
    with pytest.raises(ValueError, match="small, normal, thorough"):
        plan(budget="everything")


def test_a_server_so_slow_that_only_one_answer_fits():
    found = diagnose.probe_target(SimulatedServer(Quirks(decode_s=9.0)), budget="small")
    assert len(found.streams) == 1
    assert found.verdict.cause == "decode-bound"


def test_stop_is_heard_between_waves():
    asked = iter(range(99))
    found = diagnose.probe_target(SimulatedServer(), budget="small", should_stop=lambda: next(asked) > 4)
    assert len(found.streams) == 5
    assert "Stopped by you" in found.notes[0]


PROMETHEUS = """# HELP vllm:request_queue_time_seconds x
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{le="0.3",model_name="m"} 3.0
vllm:request_queue_time_seconds_sum{model_name="m"} 1.5
vllm:request_queue_time_seconds_count{model_name="m"} 3.0
vllm:request_queue_time_seconds_sum{model_name="n"} NaN
tgi_request_queue_duration_sum 2
tgi_request_queue_duration_count 1
llamacpp:prompt_seconds_total 4
llamacpp:prompt_tokens_total 400
"""


def test_metrics_between_two_readings():
    before = server_side.parse(PROMETHEUS)
    assert before == {"queue_s": (3.5, 4.0), "prompt_token_s": (4.0, 400.0)}
    after = {"queue_s": (5.5, 8.0), "prompt_token_s": (4.0, 400.0)}
    assert server_side.between(before, after) == {"queue_s": 0.5}


def test_trtllm_records():
    times = {"arrival_time": 1.0, "first_scheduled_time": 1.5, "first_token_time": 2.0, "last_token_time": 4.0}
    record = {"request_id": 1, "perf_metrics": {"timing_metrics": times}}
    found = server_side.parse_trtllm([record, {}, 3, {"perf_metrics": None}])
    assert found == {"queue_s": (0.5, 1), "prefill_s": (0.5, 1), "decode_s": (2.0, 1)}


def test_the_command(capsys, tmp_path, monkeypatch):
    with LoopbackServer(Quirks(decode_s=0.002, prefill_tok_s=9000)) as server:
        options = ["--prompt-tokens", "20", "--new-tokens", "8", "--concurrency", "1", "--budget", "small"]
        saved = tmp_path / "r.json"
        with pytest.raises(SystemExit) as ended:
            main(["diagnose", server.url, *options, "--save", str(saved), "--save", str(tmp_path / "r.html")])
    assert not ended.value.code
    out, err = capsys.readouterr()
    assert "What would move it" in out
    assert "At most" in err
    for arguments in ([str(saved), "--json"], ["http://127.0.0.1:1", "--dry-run"]):
        with pytest.raises(SystemExit) as ended:
            main(["diagnose", *arguments])
        assert not ended.value.code
    out = capsys.readouterr().out
    assert '"format": "labkit-diagnosis-1"' in out
    assert "At most" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["http://127.0.0.1:9"], "cannot be reached"),
        (["no-such-file.json"], "neither an address"),
        (["http://127.0.0.1:9", "--budget", "huge"], "small, normal, thorough"),
        (["http://127.0.0.1:9", "--concurrency", "1000"], "at most 64"),
        (["http://127.0.0.1:9", "--save", "no/such/folder.json"], "cannot write"),
    ],
)
def test_the_commands_errors_are_sentences(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["diagnose", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
