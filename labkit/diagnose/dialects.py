"""How servers are asked, and what their events mean.

A dialect is a path and a request body; the answer is read by what is in it, so a recording needs no label. Every
server's event becomes a ``Delta``: text, reasoning, tool call, tokens it says it bears, usage, timings, an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Ask:
    """One request. ``prompt`` or ``messages``; a dialect turns one into the other where it must."""

    prompt: str = ""
    max_new_tokens: int = 32
    messages: tuple[dict[str, str], ...] = ()
    temperature: float = 0.0
    ignore_eos: bool = True
    """An answer of the length asked for, where the server can be told so."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the body, sent as they are."""
    meta: dict[str, Any] = field(default_factory=dict)
    """What the asker wants to find in the recording again: a probe's name, its length."""

    @property
    def chat(self) -> list[dict[str, str]]:
        return list(self.messages) or [{"role": "user", "content": self.prompt}]

    @property
    def text(self) -> str:
        return self.prompt or "\n".join(message["content"] for message in self.messages)


@dataclass(frozen=True)
class Usage:
    """What the server counted. None: it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


@dataclass(frozen=True)
class Delta:
    """What one event says."""

    text: str = ""
    reasoning: str = ""
    tool: str = ""
    n_tokens: int | None = None
    """Tokens that the event itself counts (TGI's one a token, log-probabilities, token ids); None: not said."""
    has_choices: bool = False
    finish_reason: str | None = None
    usage: Usage | None = None
    timings: dict[str, float] | None = None
    """The server's own: prompt_ms, predicted_ms, prompt_n, predicted_n, cache_n, queue_ms, as far as it says."""
    error: str | None = None
    done: bool = False

    @property
    def has_text(self) -> bool:
        return bool(self.text or self.reasoning or self.tool)


def read_event(data: str, name: str = "") -> Delta | None:
    """The event's meaning, whichever server sent it; None for what bears none. Never raises on foreign input."""
    text = data.strip()
    if not text:
        return None
    if text == "[DONE]":
        return Delta(done=True)
    try:
        payload = json.loads(text)
    except ValueError:
        return Delta(error=f"not JSON: {text[:200]}") if name == "error" else None
    try:
        return _read_payload(payload, name) if isinstance(payload, dict) else None
    except (TypeError, AttributeError):  # the right names with something else in them
        return None


def _read_payload(payload: dict[str, Any], name: str) -> Delta | None:
    if message := _error(payload, name):
        return Delta(error=message)
    if "choices" in payload or "usage" in payload:
        return _openai(payload)
    if isinstance(payload.get("token"), dict):
        return _tgi(payload)
    if "text_output" in payload:
        return Delta(text=_text(payload["text_output"]), has_choices=True)
    if isinstance(payload.get("meta_info"), dict):
        return _sglang(payload)
    return Delta(timings=_timings(payload.get("timings"))) if "timings" in payload else None


def _error(payload: dict[str, Any], name: str) -> str | None:
    found = payload.get("error")
    if isinstance(found, dict):
        return str(found.get("message") or found)
    if found:
        return str(found)
    if payload.get("object") == "error" or name == "error":
        return str(payload.get("message") or payload)
    return None


def _openai(payload: dict[str, Any]) -> Delta:
    text = reasoning = tool = ""
    finish, n_tokens = None, None
    choices = [choice for choice in payload.get("choices") or [] if isinstance(choice, dict)]
    for choice in choices:
        delta = choice.get("delta") or choice.get("message") or {}
        text += _text(delta.get("content")) + _text(delta.get("refusal")) + _text(choice.get("text"))
        reasoning += _text(delta.get("reasoning") or delta.get("reasoning_content"))
        for call in delta.get("tool_calls") or []:
            function = call.get("function") or {} if isinstance(call, dict) else {}
            tool += _text(function.get("name")) + _text(function.get("arguments"))
        finish = choice.get("finish_reason") or finish
        counted = _counted(choice)
        n_tokens = counted if counted is not None else n_tokens
    usage = _usage(payload.get("usage"))
    timings = _timings(payload.get("timings"))
    return Delta(text, reasoning, tool, n_tokens, bool(choices), finish, usage, timings)


def _counted(choice: dict[str, Any]) -> int | None:
    """Tokens that a choice lists one by one."""
    if isinstance(choice.get("token_ids"), list):
        return len(choice["token_ids"])
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, dict):
        for key in ("content", "tokens"):
            if isinstance(logprobs.get(key), list):
                return len(logprobs[key])
    return None


def _usage(found: Any) -> Usage | None:
    if not isinstance(found, dict):
        return None
    prompt, completion = (found.get(f"{side}_tokens_details") or {} for side in ("prompt", "completion"))
    return Usage(
        _count(found.get("prompt_tokens")),
        _count(found.get("completion_tokens")),
        _count(prompt.get("cached_tokens")) if isinstance(prompt, dict) else None,
        _count(completion.get("reasoning_tokens")) if isinstance(completion, dict) else None,
    )


def _timings(found: Any) -> dict[str, float] | None:
    if not isinstance(found, dict):
        return None
    return {key: float(value) for key, value in found.items() if isinstance(value, int | float)} or None


def _tgi(payload: dict[str, Any]) -> Delta:
    token, details = payload["token"], payload.get("details") or {}
    text = "" if token.get("special") else _text(token.get("text"))
    usage = Usage(_count(details.get("input_length")), _count(details.get("generated_tokens"))) if details else None
    finish = details.get("finish_reason") or ("stop" if payload.get("generated_text") is not None else None)
    return Delta(text, n_tokens=1, has_choices=True, finish_reason=finish, usage=usage)


def _sglang(payload: dict[str, Any]) -> Delta:
    info = payload["meta_info"]
    finish = info.get("finish_reason")
    usage = Usage(
        _count(info.get("prompt_tokens")), _count(info.get("completion_tokens")), _count(info.get("cached_tokens"))
    )
    reason = finish.get("type") if isinstance(finish, dict) else finish
    return Delta(_text(payload.get("text")), has_choices=True, finish_reason=reason, usage=usage)


def _text(found: Any) -> str:
    if isinstance(found, list):  # content as parts
        return "".join(_text(part.get("text")) for part in found if isinstance(part, dict))
    return found if isinstance(found, str) else ""


def _count(found: Any) -> int | None:
    return int(found) if isinstance(found, int | float) and found >= 0 else None


@dataclass(frozen=True)
class Dialect:
    """``body(ask, model)``: what every server of the kind takes, and what some refuse and are then asked without."""

    name: str
    path: str
    summary: str
    body: Callable[[Ask, str | None], tuple[dict[str, Any], dict[str, Any]]]


_COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
"""Counts with every event (vLLM, SGLang, labkit)."""


def _chat_body(ask: Ask, model: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    body = {"messages": ask.chat, "max_tokens": ask.max_new_tokens, "temperature": ask.temperature, "stream": True}
    return ({"model": model} if model else {}) | body | ask.extra, _COUNTED | {"ignore_eos": ask.ignore_eos}


def _completions_body(ask: Ask, model: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    body = {"prompt": ask.text, "max_tokens": ask.max_new_tokens, "temperature": ask.temperature, "stream": True}
    return ({"model": model} if model else {}) | body | ask.extra, _COUNTED | {"ignore_eos": ask.ignore_eos}


def _tgi_body(ask: Ask, model: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    parameters: dict[str, Any] = {"max_new_tokens": ask.max_new_tokens, "details": True}
    parameters |= {"temperature": ask.temperature, "do_sample": True} if ask.temperature > 0 else {"do_sample": False}
    return {"inputs": ask.text, "parameters": parameters | ask.extra}, {}


def _triton_body(ask: Ask, model: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    body = {"text_input": ask.text, "max_tokens": ask.max_new_tokens, "stream": True}
    return body | ask.extra, {"temperature": ask.temperature, "bad_words": "", "stop_words": ""}


def _sglang_body(ask: Ask, model: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    sampling = {"max_new_tokens": ask.max_new_tokens, "temperature": ask.temperature}
    return {"text": ask.text, "stream": True, "sampling_params": sampling} | ask.extra, {}


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect("openai-chat", "/v1/chat/completions", "vLLM, trtllm-serve, SGLang, llama.cpp, labkit", _chat_body),
        Dialect(
            "openai-completions", "/v1/completions", "the same servers, without a chat template", _completions_body
        ),
        Dialect("tgi", "/generate_stream", "Text Generation Inference", _tgi_body),
        Dialect("triton", "/v2/models/{model}/generate_stream", "Triton's generate extension", _triton_body),
        Dialect("sglang", "/generate", "SGLang's own endpoint", _sglang_body),
    )
}


def find_dialect(name: str) -> Dialect:
    """Raises ValueError that lists the choices."""
    if name not in DIALECTS:
        raise ValueError(f"unknown dialect {name!r}: choose one of {', '.join(DIALECTS)}.")
    return DIALECTS[name]
