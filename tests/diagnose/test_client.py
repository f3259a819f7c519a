"""The client against a server that sends what it is told: every way to fail ends in a sentence, in bounded time."""

from __future__ import annotations

import json
import threading

import pytest

from labkit.diagnose.client import Client, Limits, require
from labkit.diagnose.dialects import DIALECTS, Ask
from labkit.diagnose.endpoint import Endpoint, ServerError, find_endpoint
from labkit.diagnose.stream import read_stream
from tests.diagnose.scripted import OK, answer, scripted

TOKENS = [f'data: {{"choices": [{{"delta": {{"content": "{c}"}}}}]}}\n\n'.encode() for c in "abc"]
DONE = b"data: [DONE]\n\n"


def record(script, *, ask=None, limits=None, dialect="openai-chat", **options):
    with scripted(script) as (url, requests):
        path = DIALECTS[dialect].path.format(model="m")
        with Client(Endpoint(url + path, dialect, "m", **options), limits=limits) as client:
            return client.record(ask or Ask("Hello", 3)), requests


def test_times_are_those_of_the_bytes():
    script = [0.05, OK, 0.1, TOKENS[0], 0.05, TOKENS[1], 0.05, TOKENS[2], DONE]
    recording, _ = record(script)
    found = read_stream(recording)
    assert (found.text, found.complete) == ("abc", True)
    assert 0 < recording.marks["connected"] < recording.marks["sent"] <= recording.marks["headers"]
    assert recording.marks["headers"] < (found.first_token_s or 0) < (found.last_token_s or 0) <= recording.end_s
    assert found.client_share is not None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_asked(dialect):
    _, (request,) = record([OK, DONE], dialect=dialect, api_key="secret", ask=Ask("Tell me", 7))
    head, _, body = request.partition(b"\r\n\r\n")
    assert head.startswith(f"POST {DIALECTS[dialect].path.format(model='m')} ".encode())
    assert b"authorization: bearer secret" in head.lower()
    assert b"Tell me" in body
    assert b"7" in body


def test_a_strict_server_is_asked_again_and_only_once():
    refuses = [answer(422, b'{"error": "unexpected keys: ignore_eos"}')]
    with (
        scripted(refuses, [OK, TOKENS[0], DONE]) as (url, requests),
        Client(Endpoint(url + "/v1/chat/completions", "openai-chat")) as client,
    ):
        first, second = client.record(Ask("a", 3)), client.record(Ask("b", 3))
    assert (read_stream(first).text, read_stream(second).text) == ("a", "a")
    assert [b"ignore_eos" in request for request in requests] == [True, False, False]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "wants a key"),
        (404, "nothing at this path"),
        (429, "limits how many"),
        (500, "its own log"),
        (302, "elsewhere"),
    ],
)
def test_a_status_is_explained(status, words):
    recording, requests = record([answer(status, b'{"detail": "because"}', more="Location: http://192.0.2.1/\r\n")])
    assert words in (recording.error or "")
    assert recording.status == status
    assert len(requests) == 1
    with pytest.raises(ServerError, match=words):
        require(recording)


def test_a_web_page_is_no_stream():
    recording, _ = record([answer(200, b"<!doctype html><title>Log in</title>", kind="text/html; charset=utf-8")])
    assert "a web page came" in (recording.error or "")


def test_a_dropped_connection_keeps_what_came():
    head = OK.replace(b"Connection: close\r\n", b"Transfer-Encoding: chunked\r\n")
    piece = b"%x\r\n%s\r\n" % (len(TOKENS[0]), TOKENS[0])
    recording, _ = record([head, piece, 0.05])
    assert recording.ended == "dropped"
    assert "broke off" in (recording.error or "")
    assert read_stream(recording).text == "a"


def test_silence_has_an_end():
    recording, _ = record([OK, TOKENS[0], 60.0], limits=Limits(idle_s=1.5))
    assert (recording.ended, read_stream(recording).text) == ("timeout", "a")
    recording, _ = record([60.0], limits=Limits(idle_s=0.3))
    assert "said nothing" in (recording.error or "")


def test_an_endless_stream_is_left():
    script = [OK, *[part for _ in range(200) for part in (TOKENS[0], 0.01)]]
    recording, _ = record(script, limits=Limits(max_s=0.2))
    assert recording.ended == "limit"
    assert "may ignore the token limit" in (recording.error or "")


def test_no_server_there():
    with Client(Endpoint("http://127.0.0.1:9/v1/chat/completions", "openai-chat")) as client:
        assert "cannot be reached" in (client.record(Ask("x")).error or "")
    with pytest.raises(ServerError, match="cannot be reached"):
        find_endpoint("http://127.0.0.1:9")
    with pytest.raises(ServerError, match="cannot be reached"):
        find_endpoint("http://no-such-host.invalid")


def test_tls_to_a_server_without():
    with scripted([answer(200, b"{}")]) as (url, _), pytest.raises(ServerError, match="TLS failed"):
        find_endpoint(url.replace("http", "https"))


@pytest.mark.parametrize("address", ["", "localhost:8000", "ftp://x", "http://", "file:///etc/passwd"])
def test_no_address(address):
    with pytest.raises(ValueError, match="not the address of a server"):
        find_endpoint(address)


def test_stop_is_heard_while_waiting():
    with (
        scripted([OK, TOKENS[0], 3600.0]) as (url, _),
        Client(Endpoint(url + "/v1/chat/completions", "openai-chat")) as client,
    ):
        live = client.stream(Ask("x"))
        seen = []
        for delta in live:  # ends: nothing else does before the test's own limit
            seen.append(delta.text)
            threading.Timer(0.2, live.stop).start()
        assert seen == ["a"]
        assert (live.recording.ended, live.recording.error) == ("stopped", None)


def test_many_at_once():
    with (
        scripted([OK, 0.02, *TOKENS, DONE]) as (url, requests),
        Client(Endpoint(url + "/v1/chat/completions", "openai-chat")) as client,
    ):
        found = client.record_all([Ask(str(n)) for n in range(8)])
    assert [read_stream(each).text for each in found] == ["abc"] * 8
    assert len(requests) == 8
    assert all(each.meta["sent_s"] >= 0 for each in found)


MODELS = json.dumps({"data": [{"id": "smol", "owned_by": "llamacpp"}]}).encode()


def test_the_server_says_who_it_is():
    with scripted([answer(200, MODELS)]) as (url, _):
        for address in (url, url + "/", url + "/v1", url + "/v1/chat/completions"):
            found = find_endpoint(address)
            assert (found.url, found.dialect) == (url + "/v1/chat/completions", "openai-chat")
            assert (found.model, found.server, found.base) == ("smol", "llamacpp", url)


def test_tgi_and_triton_are_found():
    nothing = [answer(404, b"")]
    with scripted(nothing, nothing, [answer(200, b'{"model_id": "t"}')]) as (url, _):
        found = find_endpoint(url)
        assert (found.url, found.dialect, found.base) == (url + "/generate_stream", "tgi", url)
    with scripted(nothing, nothing, nothing, [answer(200, b'{"name": "triton", "extensions": []}')]) as (url, _):
        found = find_endpoint(url, model="m")
        assert (found.url, found.dialect) == (url + "/v2/models/m/generate_stream", "triton")
    with scripted(nothing) as (url, _), pytest.raises(ServerError, match="not as a known server does"):
        find_endpoint(url)
    with scripted([answer(401, b"")]) as (url, _), pytest.raises(ServerError, match="wants a key"):
        find_endpoint(url)


def test_an_unknown_dialect_lists_the_known():
    with pytest.raises(ValueError, match="openai-chat, openai-completions, tgi, triton, sglang"):
        find_endpoint("http://127.0.0.1:9", dialect="morse")
