"""Recordings from elsewhere: what curl, ts and a browser write, read back and judged without a network."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from labkit import diagnose
from labkit.diagnose import pasted
from labkit.diagnose.loopback import LoopbackServer
from labkit.diagnose.quirks import Quirks
from labkit.diagnose.stream import read_stream

EVENTS = [
    '{"choices":[{"delta":{"role":"assistant","content":""}}]}',
    '{"choices":[{"delta":{"content":"Hel"}}]}',
    '{"choices":[{"delta":{"content":"lo"},"finish_reason":"stop"}]}',
    "[DONE]",
]
PLAIN = "".join(f"data: {event}\n\n" for event in EVENTS)
TIMINGS = '{"choices":[],"timings":{"cache_n":0,"prompt_n":900,"prompt_ms":2400.0,"predicted_n":2,"predicted_ms":30.0}}'


def test_plain_output_has_tokens_and_no_times():
    (recording,) = pasted.read_text(PLAIN)
    assert not recording.timed
    assert read_stream(recording).text == "Hello"
    report = diagnose.replay(PLAIN)
    assert report.verdict.cause == "unknown"
    assert "--trace-time" in report.verdict.remedies[0]
    assert not report.conventions()


def test_plain_output_with_the_servers_own_times():
    report = diagnose.replay(PLAIN.replace("data: [DONE]", f"data: {TIMINGS}\n\ndata: [DONE]"))
    assert report.verdict.cause == "prefill-bound"
    assert report.measured.ttft_s == pytest.approx(2.4)


@pytest.mark.parametrize("lost", ["\n\n", "\n", "\r\n"])
def test_a_paste_that_lost_its_blank_lines(lost):
    assert read_stream(pasted.read_text(PLAIN.replace("\n\n", lost))[0]).text == "Hello"


@pytest.mark.parametrize(
    "stamps",
    [
        ["0.100000", "0.900000", "1.000000", "1.000100"],
        ["1796083200.1", "1796083200.9", "1796083201.0", "1796083201.0"],
        ["12:00:00.1", "12:00:00.9", "12:00:01.0", "12:00:01.0"],
        ["[2026-12-01T12:00:00.1", "[2026-12-01T12:00:00.9", "[2026-12-01T12:00:01.0", "[2026-12-01T12:00:01.0"],
    ],
)
def test_lines_with_times(stamps):
    lines = [f"{at}{']' if at[0] == '[' else ''} data: {event}" for at, event in zip(stamps, EVENTS, strict=True)]
    found = read_stream(pasted.read_text("\n".join(lines))[0])
    assert [round(t.at_s - (found.first_event_s or 0), 3) for t in found.tokens] == [0.8, 0.9]


def har(**entry: Any) -> str:
    body = {
        "startedDateTime": "2026-12-01T12:00:00.000Z",
        "request": {"url": "https://host.example/v1/chat/completions?key=secret"},
        "response": {
            "status": 200,
            "headers": [
                {"name": "Content-Type", "value": "text/event-stream"},
                {"name": "Set-Cookie", "value": "secret"},
            ],
            "content": {"text": PLAIN},
        },
        "timings": {"blocked": 1, "dns": -1, "connect": 20, "ssl": 10, "send": 1, "wait": 800, "receive": 500},
    }
    return json.dumps({"log": {"entries": [{"request": {}}, body | entry]}})


def test_a_har_has_a_beginning_and_an_end():
    (recording,) = pasted.read_text(har())
    found = read_stream(recording)
    assert (found.text, recording.end_s) == ("Hello", pytest.approx(1.322))
    assert found.first_event_s == pytest.approx(0.822)
    assert "secret" not in json.dumps(recording.to_dict())
    assert diagnose.replay(har()).verdict.cause != "buffered"


def test_a_har_of_an_event_source_has_every_time():
    events = [{"time": 1796126400.0 + at, "data": data} for at, data in zip((0.2, 0.5, 0.9, 1.0), EVENTS, strict=True)]
    found = read_stream(pasted.read_text(har(_eventSourceMessages=events))[0])
    assert [round(t.at_s, 2) for t in found.tokens] == [0.5, 0.9]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
@pytest.mark.parametrize("options", ["-sN --trace - --trace-time", "-sN --trace-ascii - --trace-time", "-sNi", "-sN"])
def test_what_curl_prints(options):
    body = json.dumps({"messages": [{"role": "user", "content": "word " * 20}], "max_tokens": 9, "stream": True})
    with LoopbackServer(Quirks(decode_s=0.01, prefill_tok_s=500)) as server:
        command = ["curl", *options.split(), "-d", body, server.url + "/v1/chat/completions"]
        text = subprocess.run(command, capture_output=True, check=True, timeout=30).stdout.decode()
    (recording,) = pasted.read_text(text)
    found = read_stream(recording)
    assert (len(found.tokens), found.finish_reason) == (9, "length")
    assert recording.timed == ("--trace-time" in options)
    if recording.timed:
        assert found.tokens[0].at_s < found.tokens[-1].at_s
        assert recording.marks["sent"] == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "hello",
        "{",
        "[]",
        '{"a": 1}',
        '{"log": {}}',
        '{"log": {"entries": [3, null, {}]}}',
        "<html>",
        "x: y\n" * 50,
    ],
)
def test_what_is_no_recording(text):
    with pytest.raises(ValueError, match=r"paste|recording|stream|HAR"):
        pasted.read_text(text)


def test_one_long_wait_alone_is_said_to_be_a_guess():
    slow = PLAIN.replace("Hel", "x " * 400)
    lines = "".join(f"{at} {line}\n" for at, line in zip((5.0, 5.1, 5.15, 5.2), slow.split("\n\n"), strict=False))
    verdict = diagnose.replay(lines).verdict
    assert verdict.symptom == "slow to start"
    assert verdict.confidence <= 0.4
    assert any("guess" in line for line in verdict.evidence)
