"""A server whose truth is known: how fast it is, and everything odd that servers do on the wire.

``Quirks`` is the truth; ``Writer`` puts tokens on the wire as the servers of the table in ``dialects`` do. Two things
run on it: ``simulated`` on a clock of its own (a diagnosis of minutes in milliseconds), ``loopback`` over real HTTP.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from labkit.registry import check_options, option

WORDS = (
    *("the", "of", "and", "to", "in", "is", "wörld", "naïve", "café", "日本", "語", "🙂", "€5"),
    *("and\u2028so", "x=", "it's", "{y}", "\x85", "data:", ":colon"),
)
"""What the mock writes, a token each: characters of one to four bytes, and the line ends that are none."""
N_TEMPLATE = 8
BLOCK = 16
"""A prefix is reused in whole blocks of so many tokens."""
PROXY_S = 0.0002


@dataclass(frozen=True)
class Quirks:
    """A mock server. Rates are in tokens a second, times in seconds."""

    prefill_tok_s: float = option(4000.0, low=1.0, high=1e7, help="prompt tokens read in a second")
    decode_s: float = option(0.02, low=0.0001, high=10.0, help="one decode step of one sequence without context")
    context_s: float = option(0.0, low=0.0, high=10.0, help="what 1,000 tokens of context add to a step")
    sequence_s: float = option(0.0005, low=0.0, high=1.0, help="what one more sequence adds to a step")
    fixed_s: float = option(0.01, low=0.0, high=60.0, help="network and handling, for each request")
    n_slots: int = option(16, low=1, high=1024, help="sequences at once; more wait")
    queue_s: float = option(0.0, low=0.0, high=60.0, help="mean wait behind other people's requests")
    cold_s: float = option(0.0, low=0.0, high=600.0, help="what the first request waits for")
    prefix_cache: bool = option(False, choices=(False, True), help="reuses the beginning of earlier prompts")
    jitter: float = option(0.02, low=0.0, high=1.0, help="how much a step's time varies")
    dialect: str = option("openai-chat", choices=("openai-chat", "openai-completions", "tgi", "triton"))
    tokens_per_event: int = option(1, low=1, high=1000, help="merged into one event; the first comes alone")
    split: bool = option(False, choices=(False, True), help="cuts events anywhere, inside a character too")
    line_end: str = option("\n", choices=("\n", "\r\n", "\r"))
    ping_s: float = option(0.0, low=0.0, high=60.0, help="a comment line when silent for so long; 0 never")
    role_first: bool = option(True, choices=(False, True), help="a chunk with the role before the first token")
    empty_events: int = option(0, low=0, high=1000, help="every n-th token comes without text; 0 never")
    says_usage: bool = option(True, choices=(False, True), help="counts tokens in a last event")
    says_timings: bool = option(False, choices=(False, True), help="reports its own times, as llama.cpp does")
    stops_after: int = option(0, low=0, high=100_000, help="ends the answer after n tokens; 0 as asked")
    error_after: int = option(0, low=0, high=100_000, help="an error under HTTP 200 after n tokens; 0 never")
    drop_after: int = option(0, low=0, high=100_000, help="breaks the connection after n tokens; 0 never")
    buffer_bytes: int = option(0, low=0, high=10_000_000, help="a proxy that sends in pieces of so many bytes")
    client_s: float = option(0.0, low=0.0, high=10.0, help="the reader's own time for an event (simulated link only)")
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(self)


class Writer:
    """One answer on the wire: bytes for its beginning, for each token, and for its end."""

    def __init__(self, quirks: Quirks, *, n_prompt_tokens: int, n_cached: int, n_new: int, random_: random.Random):
        self._quirks, self._random, self._n_new = quirks, random_, n_new
        self._counts = {"prompt": n_prompt_tokens, "cached": n_cached}
        self._held: list[str] = []
        self._n_tokens = 0
        self.text = ""

    def begin(self) -> bytes:
        if self._quirks.role_first and self._quirks.dialect == "openai-chat":
            return self._event(_chat({"role": "assistant", "content": ""}))
        return b""

    def ping(self) -> bytes:
        return f": ping{self._quirks.line_end * 2}".encode()

    def token(self) -> bytes:
        """The next token; empty bytes while it is held back to be merged."""
        q = self._quirks
        self._n_tokens += 1
        n = self._n_tokens
        silent = q.empty_events and n % q.empty_events == 0 and n not in (1, self._n_new)
        self._held.append("" if silent else " " + self._random.choice(WORDS))
        if n > 1 and n < self._n_new and len(self._held) < q.tokens_per_event:
            return b""
        return self._flush(last=n == self._n_new)

    def _flush(self, *, last: bool) -> bytes:
        words, self._held = self._held, []
        text = "".join(words)
        self.text += text
        q = self._quirks
        if q.dialect == "openai-chat":
            return self._event(_chat({"content": text}))
        if q.dialect == "openai-completions":
            return self._event({"object": "text_completion", "choices": [{"index": 0, "text": text}]})
        if q.dialect == "triton":
            return self._event({"model_name": "mock", "text_output": text})
        sent = b""
        for at, word in enumerate(words):  # TGI sends each token, however many it made together
            token = {"id": at, "text": word, "logprob": -0.5, "special": False}
            sent += self._event(
                {"index": self._n_tokens - len(words) + at + 1, "token": token} | self._end_of_tgi(last)
            )
        return sent

    def _end_of_tgi(self, last: bool) -> dict[str, Any]:
        details = {
            "finish_reason": "length",
            "generated_tokens": self._n_tokens,
            "input_length": self._counts["prompt"],
        }
        return {"generated_text": self.text, "details": details} if last else {"generated_text": None, "details": None}

    def end(self, timings: dict[str, float]) -> bytes:
        """What follows the last token: finish reason, usage, timings, [DONE], as far as the dialect has them."""
        q = self._quirks
        if q.dialect in ("tgi", "triton"):
            return b""
        usage = {
            "prompt_tokens": self._counts["prompt"],
            "completion_tokens": self._n_tokens,
            "prompt_tokens_details": {"cached_tokens": self._counts["cached"]},
        }
        finish = (
            _chat({}, "length")
            if q.dialect == "openai-chat"
            else {"choices": [{"text": "", "finish_reason": "length"}]}
        )
        last = (
            {"choices": []}
            | ({"usage": usage} if q.says_usage else {})
            | ({"timings": timings} if q.says_timings else {})
        )
        sent = self._event(finish) + (self._event(last) if q.says_usage or q.says_timings else b"")
        return sent + f"data: [DONE]{q.line_end * 2}".encode()

    def error(self) -> bytes:
        return self._event({"error": {"message": "the mock fails here, as it was told to", "code": 500}})

    def _event(self, payload: dict[str, Any]) -> bytes:
        space = "" if self._quirks.dialect == "tgi" else " "
        text = json.dumps(payload, ensure_ascii=False)
        return f"data:{space}{text}{self._quirks.line_end * 2}".encode()


def _chat(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
    }


class Proxy:
    """What lies between: it may hold bytes back until a buffer is full, and cut them anywhere."""

    def __init__(self, quirks: Quirks, random_: random.Random) -> None:
        self._quirks, self._random, self._held = quirks, random_, b""

    def push(self, data: bytes, *, last: bool = False) -> list[bytes]:
        """The pieces that leave now, in order."""
        self._held += data
        size = self._quirks.buffer_bytes
        if size and not last:
            n = len(self._held) // size * size
            data, self._held = self._held[:n], self._held[n:]
        else:
            data, self._held = self._held, b""
        if not data:
            return []
        if not self._quirks.split or len(data) < 2:
            return [data]
        at = self._random.randrange(1, len(data))
        return [data[:at], data[at:]]
