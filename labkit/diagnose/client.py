"""The client: one request, its answer's bytes stamped as they come, and never longer than agreed.

The clock is read before anything is decoded. Whatever goes wrong on the way ends in the recording as a sentence, so a
server that fails half-way still leaves what it had sent.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from labkit.diagnose.dialects import Ask, Delta, find_dialect, read_event
from labkit.diagnose.endpoint import CONNECT_S, Endpoint, ServerError, is_loopback, status_sentence, unreachable
from labkit.diagnose.recording import Recording, kept_headers
from labkit.diagnose.wire import EventReader, Read, WireError

REFUSALS = (400, 422)
"""A strict server's answer to a field it does not know: asked once more without what is optional."""


@dataclass(frozen=True)
class Limits:
    """What one request may take. A stream that goes beyond is left, and says so."""

    max_s: float = 120.0
    idle_s: float = 60.0
    max_bytes: int = 20_000_000


class Live:
    """An answer under way: iterate it for its deltas; ``recording`` is what has come so far.

    ``stop()`` may be called from another thread: the connection is closed, which every server takes for a cancel.
    """

    def __init__(
        self,
        http: httpx.Client,
        endpoint: Endpoint,
        ask: Ask,
        *,
        limits: Limits,
        clock: Callable[[], float],
        refused: threading.Event,
    ) -> None:
        self._http, self._endpoint, self._ask, self._limits, self._clock = http, endpoint, ask, limits, clock
        self._refused = refused
        self._stop = threading.Event()
        self._socket: Any = None
        self._reads: list[Read] = []
        self._marks: dict[str, float] = {}
        self._status: int | None = None
        self._headers: dict[str, str] = {}
        self._end_s = 0.0
        self._ended, self._error = "failed", None

    def stop(self) -> None:
        self._stop.set()
        stream = self._socket
        raw = stream.get_extra_info("socket") if stream is not None else None
        if raw is not None:
            with contextlib.suppress(OSError):
                raw.shutdown(2)  # wakes the thread that waits for bytes

    @property
    def recording(self) -> Recording:
        return Recording(
            reads=tuple(self._reads),
            end_s=self._end_s or (self._reads[-1].at_s if self._reads else 0.0),
            ended=self._ended,
            error=self._error,
            status=self._status,
            headers=self._headers,
            marks=dict(self._marks),
            url=self._endpoint.url,
            dialect=self._endpoint.dialect,
            max_new_tokens=self._ask.max_new_tokens,
            n_prompt_chars=len(self._ask.text),
            meta=dict(self._ask.meta),
        )

    def __iter__(self) -> Iterator[Delta]:
        """Deltas as they come. Ends without raising: what went wrong is in ``recording.error``."""
        reader = EventReader()
        try:
            for read in self.reads():
                for event in reader.push(read):
                    if (delta := read_event(event.data, event.name)) is not None:
                        yield delta
        except WireError as error:
            self._ended, self._error = "limit", str(error)
        for event in reader.flush():
            if (delta := read_event(event.data, event.name)) is not None:
                yield delta

    def reads(self) -> Iterator[Read]:
        """Stamped bytes, and nothing done with them."""
        start = self._clock()
        required, optional = find_dialect(self._endpoint.dialect).body(self._ask, self._endpoint.model)
        try:
            may_refuse = bool(optional) and not self._refused.is_set()
            answered = yield from self._once(optional | required if may_refuse else required, start, may_refuse)
            if not answered:
                self._refused.set()
                start = self._clock()
                yield from self._once(required, start, False)
        except GeneratorExit:
            self._stop.set()
            raise
        except httpx.HTTPError as error:
            self._failed(error)
        finally:
            self._end_s = self._clock() - start
            if self._stop.is_set():
                self._ended, self._error = "stopped", None

    def _once(self, body: dict[str, Any], start: float, again: bool) -> Iterator[Read]:
        """One try; True when it is the answer, False when the server refused a field that it can be asked without."""
        self._marks.clear()

        def trace(name: str, info: dict[str, Any]) -> None:
            mark = _TRACED.get(name)
            if mark:
                self._marks[mark] = self._clock() - start
            if name == "connection.connect_tcp.complete":
                self._socket = info.get("return_value")

        url, headers = self._endpoint.url, self._endpoint.headers
        extensions = {"trace": trace}
        with self._http.stream("POST", url, json=body, headers=headers, extensions=extensions) as answer:
            self._marks["headers"] = self._clock() - start
            self._socket = answer.extensions.get("network_stream")
            self._status, self._headers = answer.status_code, kept_headers(dict(answer.headers))
            if answer.status_code != 200:
                said = _beginning(answer)
                if again and answer.status_code in REFUSALS:
                    return False
                self._error = status_sentence(url, answer.status_code, said)
                return True
            if "text/html" in self._headers.get("content-type", ""):
                self._error = (
                    f"a web page came instead of a stream of tokens: {_beginning(answer)[:120]!r}. Is the address the "
                    "server's own, and not a login page's or a dashboard's?"
                )
                return True
            yield from self._read(answer, start)
        return True

    def _read(self, answer: httpx.Response, start: float) -> Iterator[Read]:
        n_bytes, asked_s = 0, self._marks["headers"]
        for data in answer.iter_bytes():
            read = Read(self._clock() - start, data, asked_s)
            self._reads.append(read)
            yield read
            n_bytes += len(data)
            asked_s = self._clock() - start
            if self._stop.is_set():
                return
            if asked_s > self._limits.max_s or n_bytes > self._limits.max_bytes:
                self._ended = "limit"
                self._error = (
                    f"the stream had not ended after {asked_s:.0f} s and {n_bytes:,} bytes, so labkit left it: the "
                    "server may ignore the token limit."
                )
                return
        self._ended = "closed"

    def _failed(self, error: httpx.HTTPError) -> None:
        if self._reads:
            self._ended = "timeout" if isinstance(error, httpx.TimeoutException) else "dropped"
            waited = f" after {self._limits.idle_s:.0f} s of silence" if self._ended == "timeout" else ""
            self._error = f"the stream broke off{waited} ({error or type(error).__name__}): what came before is kept."
        else:
            self._ended = "timeout" if isinstance(error, httpx.ReadTimeout) else "failed"
            self._error = str(unreachable(self._endpoint.url, error))


_TRACED = {
    "connection.connect_tcp.complete": "connected",
    "connection.start_tls.complete": "secured",
    "http11.send_request_body.complete": "sent",
    "http11.receive_response_headers.complete": "headers",
}


def _beginning(answer: httpx.Response, n_bytes: int = 2000) -> str:
    body = b""
    for data in answer.iter_bytes():
        body += data
        if len(body) >= n_bytes:
            break
    return body[:n_bytes].decode("utf-8", errors="replace")


class Client:
    """Connections to one endpoint. ``with Client(endpoint) as client: client.record(Ask("Hello"))``."""

    def __init__(
        self, endpoint: Endpoint, *, limits: Limits | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.endpoint, self.limits, self._clock = endpoint, limits or Limits(), clock
        timeout = httpx.Timeout(self.limits.idle_s, connect=CONNECT_S)
        pool = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        trust_env = not is_loopback(endpoint.url)
        self._refuses_optional = threading.Event()
        self._http = httpx.Client(timeout=timeout, limits=pool, verify=endpoint.verify, trust_env=trust_env)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def stream(self, ask: Ask) -> Live:
        """Begin nothing yet: the request goes out when the result is iterated."""
        return Live(
            self._http, self.endpoint, ask, limits=self.limits, clock=self._clock, refused=self._refuses_optional
        )

    def record(self, ask: Ask) -> Recording:
        """The whole answer. Never raises for what the server does: see ``recording.error``."""
        live = self.stream(ask)
        for _ in live.reads():
            pass
        return live.recording

    def record_all(self, asks: Sequence[Ask]) -> list[Recording]:
        """All at once, each in a thread of its own; ``meta["sent_s"]`` says when each went out in the wave."""
        start = self._clock()
        found: list[Recording | None] = [None] * len(asks)
        gate = threading.Barrier(len(asks))

        def one(idx: int) -> None:
            gate.wait()
            sent_s = self._clock() - start
            found[idx] = self.record(asks[idx]).labelled(sent_s=sent_s)

        threads = [threading.Thread(target=one, args=(idx,), daemon=True) for idx in range(len(asks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [each for each in found if each is not None]


def require(recording: Recording) -> Recording:
    """The recording, or ServerError with its sentence when no token can come of it."""
    if recording.error and not recording.reads:
        raise ServerError(recording.error)
    return recording
