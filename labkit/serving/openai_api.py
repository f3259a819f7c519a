"""OpenAI's words for what a service does: from a request's JSON to ``Service.submit``, and back. No HTTP here.

Fields that would change the answer and are not served here are refused; others that a client sends are passed over.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

from labkit.decoding import Sampling
from labkit.serving.request import Request

MAX_PROMPTS, MAX_STOPS, MAX_LOGPROBS = 32, 16, 20
FINISH = {"stop": "stop", "length": "length", "cancelled": "abort"}
"""``abort`` is vLLM's word for an answer that the server has ended."""

UNSERVED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
}
"""By field, the values beside null that change nothing."""


@dataclass(frozen=True)
class Asked:
    """A request, understood: one ``submit`` for each of ``prompts``, with ``options``."""

    prompts: list[Any]
    options: dict[str, Any]
    is_chat: bool
    stream: bool = False
    include_usage: bool = False
    usage_always: bool = False
    answer_id: str = field(default_factory=lambda: f"{random.SystemRandom().getrandbits(96):024x}")
    created: int = field(default_factory=lambda: int(time.time()))


def read(body: Any, *, is_chat: bool, n_room: int) -> Asked:
    """Raises ValueError that names the field which cannot be served."""
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object.")
    for name, harmless in UNSERVED.items():
        if body.get(name) is not None and body[name] not in harmless:
            raise ValueError(f"{name}={body[name]!r} is not served here: leave it out.")
    stream_options = _take(body, "stream_options", dict, {})
    default = n_room if is_chat else 16
    named = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    if (max_tokens := _take(body, named, int, default)) < 1:
        raise ValueError(f"{named}={max_tokens}: 1 or more is expected.")
    seed = _take(body, "seed", int, None)
    options = {
        "max_new_tokens": max_tokens,
        "sampling": Sampling(
            temperature=_take(body, "temperature", float, 1.0),
            top_p=_take(body, "top_p", float, 1.0),
            top_k=max(0, _take(body, "top_k", int, 0)),
            min_p=_take(body, "min_p", float, 0.0),
            repetition_penalty=_take(body, "repetition_penalty", float, 1.0),
        ),
        "seed": random.SystemRandom().getrandbits(32) if seed is None else seed,
        "stop": _stops(body.get("stop")),
        "ignore_eos": _take(body, "ignore_eos", bool, False),
        "n_logprobs": _n_logprobs(body, is_chat),
        "priority": _take(body, "priority", int, 0),
        "user": _take(body, "user", str, ""),
    }
    return Asked(
        [_messages(body.get("messages"))] if is_chat else _prompts(body.get("prompt")),
        options,
        is_chat,
        stream=_take(body, "stream", bool, False),
        include_usage=bool(stream_options.get("include_usage")),
        usage_always=bool(stream_options.get("continuous_usage_stats")),
    )


def _take(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name}={value!r}: a value of kind {kind.__name__} is expected.")
    return value


def _stops(found: Any) -> list[str]:
    stops = [found] if isinstance(found, str) else [] if found is None else found
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ValueError(f"stop={found!r}: a text or a list of up to {MAX_STOPS}, none of them empty, is expected.")
    return stops


def _n_logprobs(body: dict[str, Any], is_chat: bool) -> int | None:
    if is_chat:
        n = _take(body, "top_logprobs", int, 0) if _take(body, "logprobs", bool, False) else None
    else:
        n = _take(body, "logprobs", int, None)
    if n is not None and not 0 <= n <= MAX_LOGPROBS:
        raise ValueError(f"log-probabilities of {n} tokens were asked for: 0 to {MAX_LOGPROBS} are served.")
    return n


def _prompts(found: Any) -> list[Any]:
    several = isinstance(found, list) and found and not isinstance(found[0], int)
    prompts = found if several else [found]
    whole = all(isinstance(p, str) or (isinstance(p, list) and all(type(i) is int for i in p)) for p in prompts)
    if not whole or not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"prompt must be a text, token ids, or a list of up to {MAX_PROMPTS} of one of these.")
    return prompts


def _messages(found: Any) -> list[dict[str, str]]:
    if not isinstance(found, list) or not found:
        raise ValueError('messages must be a list such as [{"role": "user", "content": "Hello"}].')
    out = []
    for message in found:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"a message has a role and a content, not {message!r}.")
        content = message.get("content")
        if isinstance(content, list):  # content as parts
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
                raise ValueError("only parts of text are served here: no pictures and no sound.")
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise ValueError(f"a message's content must be text, not {content!r}.")
        out.append({"role": message["role"], "content": content})
    return out


# --- and back ---------------------------------------------------------------------------------------------------


class Writer:
    """Answers in OpenAI's form, for one ``Asked`` of the model ``name``."""

    def __init__(self, asked: Asked, name: str, tokenizer: Any) -> None:
        self.asked, self.name, self.tokenizer = asked, name, tokenizer

    def whole(self, requests: list[Request]) -> dict[str, Any]:
        """The answer to a request that was not to be streamed."""
        choices = []
        for idx, request in enumerate(requests):
            text, sequence = "".join(request.sequence.text), request.sequence
            said = {"message": {"role": "assistant", "content": text}} if self.asked.is_chat else {"text": text}
            choices.append(
                {
                    "index": idx,
                    **said,
                    "logprobs": self._logprobs(request, 0, len(sequence.logprobs)),
                    "finish_reason": FINISH[str(sequence.finish_reason)],
                }
            )
        kind = "chat.completion" if self.asked.is_chat else "text_completion"
        about = {"usage": usage(requests), "timings": timings(requests[0])}
        return self._frame(kind) | {"choices": choices} | about

    def chunk(
        self,
        idx: int,
        request: Request,
        text: str | None,
        first: int,
        end: int,
        *,
        role: bool = False,
        last: bool = False,
    ) -> dict[str, Any]:
        """One event of a stream: the text since the one before, and tokens ``first`` ... ``end``."""
        if self.asked.is_chat:
            delta = ({"role": "assistant", "content": ""} if role else {}) | ({"content": text} if text else {})
            said: dict[str, Any] = {"delta": delta}
        else:
            said = {"text": text or ""}
        reason = FINISH[str(request.sequence.finish_reason)] if last else None
        choice = {"index": idx, **said, "logprobs": self._logprobs(request, first, end), "finish_reason": reason}
        kind = "chat.completion.chunk" if self.asked.is_chat else "text_completion"
        counted = {"usage": usage([request], end)} if self.asked.usage_always else {}
        return self._frame(kind) | {"choices": [choice]} | counted | ({"timings": timings(request)} if last else {})

    def usage_chunk(self, requests: list[Request]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.asked.is_chat else "text_completion"
        return self._frame(kind) | {"choices": [], "usage": usage(requests)}

    def _frame(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl-" if self.asked.is_chat else "cmpl-"
        return {
            "id": prefix + self.asked.answer_id,
            "object": kind,
            "created": self.asked.created,
            "model": self.name,
        }

    def _logprobs(self, request: Request, first: int, end: int) -> dict[str, Any] | None:
        sequence = request.sequence
        if sequence.n_logprobs is None:
            return None
        pairs = list(zip(sequence.token_ids, sequence.logprobs, strict=False))[first:end]
        if self.asked.is_chat:
            return {
                "content": [
                    self._named(token_id, own) | {"top_logprobs": [self._named(i, p) for i, p in tops.items()]}
                    for token_id, (own, tops) in pairs
                ]
            }
        names = [self._text(token_id) for token_id in sequence.token_ids[:end]]
        offsets = [sum(map(len, names[:n])) for n in range(first, end)]
        return {
            "tokens": names[first:end],
            "token_logprobs": [own for _, (own, _) in pairs],
            "top_logprobs": [
                {self._text(i): p for i, p in ({**tops, token_id: own}).items()} for token_id, (own, tops) in pairs
            ],
            "text_offset": offsets,
        }

    def _text(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id])

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._text(token_id),
            "logprob": logprob,
            "bytes": list(self.tokenizer.token_bytes(token_id)),
        }


def usage(requests: list[Request], n_tokens: int | None = None) -> dict[str, Any]:
    """Tokens by OpenAI's names; ``n_tokens`` where a stream has shown fewer than there are by now."""
    n_prompt = sum(request.sequence.n_prompt for request in requests)
    n_new = sum(request.sequence.n_new for request in requests) if n_tokens is None else n_tokens
    shared = sum(request.n_shared for request in requests)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_new,
        "total_tokens": n_prompt + n_new,
        "prompt_tokens_details": {"cached_tokens": shared},
    }


def timings(request: Request) -> dict[str, float]:
    """Where a request's time went, by llama.cpp's names and beyond: ``prefill_attention_ms`` and so on, as traced."""
    sequence = request.sequence
    token_s = sequence.token_s
    started_s = request.arrived_s if request.started_s is None else request.started_s
    queue_s = started_s - request.arrived_s
    out = {
        "cache_n": float(request.n_shared),
        "prompt_n": float(sequence.n_prompt - request.n_shared),
        "predicted_n": float(len(token_s)),
        "queue_ms": queue_s * 1e3,
        "prompt_ms": (token_s[0] - queue_s) * 1e3 if token_s else 0.0,
        "predicted_ms": (token_s[-1] - token_s[0]) * 1e3 if token_s else 0.0,
    }
    for step in list(request.steps):
        for name, seconds in step.phases.items():
            key = f"{step.stage}_{name}_ms"
            out[key] = out.get(key, 0.0) + seconds * 1e3
    return out
