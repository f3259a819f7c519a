"""What each server's stream says: events as the servers write them, counts by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from labkit.diagnose import recording as recordings
from labkit.diagnose.recording import Recording
from labkit.diagnose.stream import read_stream
from labkit.diagnose.wire import Read


def sse(*payloads: Any, step_s: float = 0.1, mark: str = "data: ") -> Recording:
    """Each payload in a read of its own, a tenth of a second apart."""
    texts = [p if isinstance(p, str) else json.dumps(p) for p in payloads]
    reads = tuple(Read(step_s * (at + 1), f"{mark}{text}\n\n".encode()) for at, text in enumerate(texts))
    return Recording(reads=reads, end_s=step_s * (len(reads) + 1), status=200)


def chunk(content: Any = None, *, role: bool = False, finish: str | None = None, **more: Any) -> dict[str, Any]:
    delta = ({"role": "assistant"} if role else {}) | ({"content": content} if content is not None or role else {})
    return {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        **more,
    }


def test_vllm_chat():
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}}
    found = read_stream(
        sse(chunk("", role=True), chunk("Hel"), chunk("lo"), chunk("!"), chunk("", finish="stop"), usage, "[DONE]")
    )
    assert found.first_event_s == pytest.approx(0.1)  # the role chunk is no token
    assert found.first_token_s == pytest.approx(0.2)
    assert [round(t.at_s, 1) for t in found.tokens] == [
        0.2,
        0.3,
        0.4,
        0.5,
    ]  # the end token is the fourth that it counts
    assert (found.text, found.finish_reason, found.complete) == ("Hello!", "stop", True)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (9, 4)


def test_llama_cpp():
    timings = {"cache_n": 5, "prompt_n": 7, "prompt_ms": 150.0, "predicted_n": 2, "predicted_ms": 100.0}
    found = read_stream(
        sse(chunk(None, role=True), chunk("a"), chunk("b"), chunk(finish="length"), {"choices": [], "timings": timings,
            "usage": {"prompt_tokens": 12, "completion_tokens": 2}}, "[DONE]")
    )  # fmt: skip
    assert len(found.tokens) == 2
    assert (found.timings["prompt_ms"], found.cached_tokens) == (150.0, 5)


def test_reasoning_comes_before_the_answer():
    think = [{"choices": [{"delta": {name: "hm"}}]} for name in ("reasoning", "reasoning_content")]
    found = read_stream(sse(chunk("", role=True), *think, chunk("42"), "[DONE]"))
    assert (found.first_token_s, found.first_answer_s) == (pytest.approx(0.2), pytest.approx(0.4))
    assert (found.reasoning, found.text) == ("hmhm", "42")


def test_a_tool_call_is_an_answer():
    call = {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": '{"x"'}}]}}]}
    assert len(read_stream(sse(call, call, "[DONE]")).tokens) == 2


def test_trtllm_role_without_content_space_after_json_and_silent_tokens():
    silent = {"choices": [{"index": 0, "delta": {"content": ""}}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
    role = {"choices": [{"delta": {"role": "assistant"}}]}
    found = read_stream(sse(json.dumps(role) + " ", chunk("x"), silent, chunk("日"), chunk("y"), usage, "[DONE]"))
    assert [round(t.at_s, 1) for t in found.tokens] == [0.2, 0.3, 0.4, 0.5]
    assert found.counted_by == "usage"


def test_tgi_has_no_done_and_no_space():
    def token(idx: int, text: str, special: bool = False, **more: Any) -> dict[str, Any]:
        return {
            "index": idx,
            "token": {"id": 5, "text": text, "logprob": -0.1, "special": special},
            "generated_text": None,
        } | more

    end = {"generated_text": "ab", "details": {"finish_reason": "eos_token", "generated_tokens": 3, "input_length": 8}}
    found = read_stream(sse(token(1, "a"), token(2, "b"), token(3, "</s>", True, **end), mark="data:"))
    assert (found.text, len(found.tokens), found.finish_reason, found.complete) == ("ab", 3, "eos_token", True)
    assert (found.counted_by, found.usage.prompt_tokens) == ("events", 8)
    broken = read_stream(sse({"error": "Request failed during generation", "error_type": "generation"}, mark="data:"))
    assert "during generation" in (broken.error or "")


def test_triton_ends_when_the_connection_does():
    found = read_stream(sse(*({"model_name": "m", "text_output": word} for word in ("one", " two", " three"))))
    assert (found.text, found.complete, len(found.tokens)) == ("one two three", True, 3)


def test_sglang_is_cumulative_and_counts():
    steps = [(1, "a"), (4, "a b c d"), (7, "a b c d e f g")]
    found = read_stream(
        sse(*({"text": t, "meta_info": {"completion_tokens": n, "cached_tokens": 2}} for n, t in steps))
    )
    assert (found.text, found.cached_tokens) == ("a b c d e f g", 2)
    assert [n for _, n in found.chunks] == [1, 3, 3]
    assert [round(t.made_s, 3) for t in found.tokens] == [0.1, 0.133, 0.167, 0.2, 0.233, 0.267, 0.3]


def test_merged_tokens_are_shared_out_by_the_final_count():
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 10}}
    words = [chunk("a"), chunk(" b c d e"), chunk(" f g h i"), chunk(" j"), chunk(finish="length"), usage]
    found = read_stream(sse(*words, "[DONE]"))
    assert [n for _, n in found.chunks] == [1, 4, 4, 1]


def test_continuous_counts_are_believed():
    def counted(text: str, n: int) -> dict[str, Any]:
        return chunk(text, usage={"prompt_tokens": 3, "completion_tokens": n})

    found = read_stream(sse(counted("a", 1), counted("bcd", 2), counted("e", 6), "[DONE]"))
    assert ([n for _, n in found.chunks], found.counted_by) == ([1, 1, 4], "events")


def test_an_error_under_200_is_an_error():
    found = read_stream(sse(chunk("a"), {"error": {"message": "CUDA out of memory", "code": 500}}))
    assert (found.error, found.complete, len(found.tokens)) == ("CUDA out of memory", False, 1)


def test_an_answer_that_is_not_streamed():
    body = json.dumps(
        {"choices": [{"message": {"content": "all at once"}, "finish_reason": "stop"}]}, indent=2
    ).encode()
    whole = Recording(reads=(Read(1.0, body),), end_s=1.0, headers={"content-type": "application/json"})
    found = read_stream(whole)
    assert found.text == "all at once"
    assert "not as a stream" in found.notes[0]


@pytest.mark.parametrize(
    "foreign", ["null", "[1]", "3", '"x"', "{", '{"choices": 3}', '{"choices": [null]}', '{"a": 1}']
)
def test_foreign_payloads_are_passed_over(foreign):
    assert read_stream(sse(foreign, chunk("a"), "[DONE]")).text == "a"


def test_a_recording_survives_json_with_a_cut_character():
    kanji = "data: 日\n\n".encode()
    before = Recording(reads=(Read(0.1, kanji[:7], 0.0), Read(0.2, kanji[7:], 0.15)), end_s=0.3, meta={"probe": "x"})
    (after,) = recordings.from_json(json.loads(recordings.to_json([before])))
    assert after == before


def test_a_recording_that_is_none():
    good = Recording(reads=(Read(0.1, b"x"),), end_s=0.3).to_dict()
    for change in ({"format": "other"}, {"reads": [[0.2]]}, {"end_s": -1}, {"ended": "who knows"}, {"marks": 3}):
        with pytest.raises(ValueError, match="recording"):
            Recording.from_dict(good | change)


def test_no_secret_is_kept():
    kept = recordings.kept_headers({"Server": "nginx", "X-Api-Key": "s", "Set-Cookie": "s", "x-auth-token": "s"})
    assert kept == {"server": "nginx"}
