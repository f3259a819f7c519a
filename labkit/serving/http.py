"""The HTTP door of a service: OpenAI's paths, /health, /metrics. Needs Starlette (``pip install labkit[serve]``).

A client that goes away gives its blocks back; a body or a queue that is too long is refused before it costs anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Call
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from labkit.serving.asking import TooBusy
from labkit.serving.openai_api import Asked, Writer, read
from labkit.serving.prometheus import Metrics
from labkit.serving.request import Request
from labkit.serving.service import Service

MAX_BODY_BYTES = 2_000_000
POLL_S = 0.2
"""How often a client that nothing is sent to is looked at: is it still there?"""


class Refused(Exception):
    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


class Door:
    """What the paths do. ``model_name`` is what clients call the model; any of ``api_key`` opens /v1, None: no key."""

    def __init__(self, service: Service, *, model_name: str, api_key: str | None, max_body_bytes: int) -> None:
        self.service, self.model_name, self.max_body_bytes = service, model_name, max_body_bytes
        self._key = None if api_key is None else api_key.encode()
        self._metrics = Metrics(service, model_name)

    async def completions(self, call: Call) -> Response:
        return await self._answer(call, is_chat=False)

    async def chat(self, call: Call) -> Response:
        return await self._answer(call, is_chat=True)

    async def models(self, call: Call) -> Response:
        """The list of the one model that there is, or with a name in the path that model's card."""
        self._check_key(call)
        card = {
            "id": self.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "labkit",
            "max_model_len": self.service.n_room,
        }
        if (named := call.path_params.get("name")) is None:
            return JSONResponse({"object": "list", "data": [card]})
        self._check_name(named)
        return JSONResponse(card)

    async def health(self, call: Call) -> Response:
        alive = self.service.alive
        return JSONResponse({"status": "ok" if alive else "ended"}, status_code=200 if alive else 503)

    async def metrics(self, call: Call) -> Response:
        return PlainTextResponse(self._metrics.render(), media_type="text/plain; version=0.0.4")

    # --- one request ----------------------------------------------------------------------------------

    async def _answer(self, call: Call, *, is_chat: bool) -> Response:
        self._check_key(call)
        body = await self._body(call)
        try:
            asked = read(body, is_chat=is_chat, n_room=self.service.n_room)
        except ValueError as error:
            raise Refused(400, str(error)) from error
        self._check_name(body.get("model"))
        changed, loop = asyncio.Event(), asyncio.get_running_loop()

        def tell() -> None:  # from the engine's thread
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens any more
                loop.call_soon_threadsafe(changed.set)

        requests: list[Request] = []
        try:
            for prompt in asked.prompts:
                requests.append(await run_in_threadpool(self.service.submit, prompt, on_change=tell, **asked.options))
        except TooBusy as busy:
            _leave(requests)
            raise Refused(429, str(busy), {"Retry-After": str(math.ceil(busy.retry_after_s))}) from busy
        except ValueError as error:
            _leave(requests)
            raise Refused(400, str(error)) from error
        except RuntimeError as error:
            _leave(requests)
            raise Refused(503, str(error)) from error
        writer = Writer(asked, self.model_name, self.service.model.tokenizer)
        if asked.stream:
            return StreamingResponse(_events(call, requests, asked, writer, changed), media_type="text/event-stream")
        try:
            while not all(request.sequence.ended.is_set() for request in requests):
                await _changed(changed)
                if await call.is_disconnected():
                    return Response(status_code=499)
        finally:
            _leave(requests)
        for request in requests:
            if request.sequence.error is not None:
                raise Refused(500, f"the engine failed: {request.sequence.error}")
        return JSONResponse(writer.whole(requests))

    async def _body(self, call: Call) -> Any:
        kind = call.headers.get("content-type", "").split(";")[0].strip()
        if kind != "application/json":  # a form of a web page elsewhere must not reach a server on this machine
            sent = kind or "a body without a type"
            raise Refused(415, f"send application/json, not {sent} (curl: -H 'Content-Type: application/json').")
        data = bytearray()
        async for piece in call.stream():
            data += piece
            if len(data) > self.max_body_bytes:
                raise Refused(413, f"the body is longer than this server takes ({self.max_body_bytes:,} bytes).")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON: {error}") from error

    def _check_name(self, named: Any) -> None:
        if named not in (None, "", self.model_name):
            raise Refused(404, f"the model {named!r} is not here: this server has {self.model_name!r}.")

    def _check_key(self, call: Call) -> None:
        if self._key is None:
            return
        given = call.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if not secrets.compare_digest(given, self._key):
            raise Refused(401, "this server asks for its API key: send it as Authorization: Bearer ...")


async def _events(
    call: Call, requests: list[Request], asked: Asked, writer: Writer, changed: asyncio.Event
) -> AsyncIterator[str]:
    """Server-sent events as tokens come. Ended from outside, when the client has gone, it ends the requests."""
    shown, counted, open_ones = [0] * len(requests), [0] * len(requests), set(range(len(requests)))
    try:
        if asked.is_chat:
            for idx, request in enumerate(requests):
                yield _event(writer.chunk(idx, request, None, 0, 0, role=True))
        while open_ones:
            await _changed(changed)
            if await call.is_disconnected():
                return
            for idx in sorted(open_ones):
                sequence = requests[idx].sequence
                ended = sequence.ended.is_set()  # first: what is shown below is then all
                if ended and sequence.error is not None:
                    yield _event({"error": {"message": f"the engine failed: {sequence.error}", "type": "server_error"}})
                    return
                n_pieces, n_tokens = len(sequence.text), len(sequence.token_s)
                if n_tokens > counted[idx] or ended:
                    text = "".join(sequence.text[shown[idx] : n_pieces])
                    yield _event(writer.chunk(idx, requests[idx], text, counted[idx], n_tokens, last=ended))
                    shown[idx], counted[idx] = n_pieces, n_tokens
                if ended:
                    open_ones.discard(idx)
        if asked.include_usage:
            yield _event(writer.usage_chunk(requests))
        yield "data: [DONE]\n\n"
    finally:
        _leave(requests)


async def _changed(changed: asyncio.Event) -> None:
    """Wait for news, but not long: the client may have gone meanwhile."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(changed.wait(), POLL_S)
    changed.clear()


def _event(payload: dict[str, Any]) -> str:
    return f"data: {json.dumps(payload, ensure_ascii=False)}\n\n"


def _leave(requests: list[Request]) -> None:
    for request in requests:
        request.sequence.stop_event.set()


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    content = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return JSONResponse(content, status_code=status, headers=headers)


async def _refused(call: Call, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return _error(error.status, str(error), error.headers)


async def _gone(call: Call, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _not_found(call: Call, error: Exception) -> Response:
    return _error(404, f"{call.url.path} is not served here: /v1/completions, /v1/chat/completions, /v1/models are.")


async def _wrong_method(call: Call, error: Exception) -> Response:
    allowed = getattr(error, "headers", None) or {}
    methods = allowed.get("Allow", "another method")
    return _error(405, f"{call.url.path} is asked with {methods}, not {call.method}.", allowed)


def build_app(
    service: Service, *, model_name: str, api_key: str | None = None, max_body_bytes: int = MAX_BODY_BYTES
) -> Starlette:
    """The application, for any ASGI server."""
    door = Door(service, model_name=model_name, api_key=api_key, max_body_bytes=max_body_bytes)
    return Starlette(
        routes=[
            Route("/v1/completions", door.completions, methods=["POST"]),
            Route("/v1/chat/completions", door.chat, methods=["POST"]),
            Route("/v1/models", door.models),
            Route("/v1/models/{name:path}", door.models),
            Route("/health", door.health),
            Route("/metrics", door.metrics),
        ],
        exception_handlers={Refused: _refused, ClientDisconnect: _gone, 404: _not_found, 405: _wrong_method},
    )
