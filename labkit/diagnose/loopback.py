"""The mock server over real HTTP, on 127.0.0.1 only: the same truth, now with sockets, threads and a real clock.

It is a simulated server and says so in its headers: it waits as long as its ``Quirks`` say a step takes. For tests of
the client, for the lesson, and for trying other tools on a server whose truth is known.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from labkit.diagnose.dialects import DIALECTS, Ask
from labkit.diagnose.quirks import Proxy, Quirks, Writer
from labkit.diagnose.simulated import Engine, Job, Truth

MAX_REQUEST_BYTES = 4_000_000


class LoopbackServer:
    """``with LoopbackServer(Quirks(...)) as server: labkit diagnose server.url``."""

    def __init__(self, quirks: Quirks | None = None, *, port: int = 0) -> None:
        self.quirks = quirks or Quirks()
        self.truths: list[Truth] = []
        self.jobs: list[Job] = []
        self.engine = Engine(self.quirks)
        self.changed = threading.Condition()
        self._closing = False
        self._start = time.perf_counter()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        for work in (self._steps, self._http.serve_forever):
            threading.Thread(target=work, daemon=True, name="labkit-mock").start()

    def __enter__(self) -> LoopbackServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        self._http.shutdown()
        self._http.server_close()

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._start

    def submit(self, ask: Ask) -> Job:
        with self.changed:
            job = self.engine.submit(ask, self.now_s)
            self.jobs.append(job)
            self.changed.notify_all()
        return job

    def wait_until(self, at_s: float) -> bool:
        """False when the server closes meanwhile."""
        with self.changed:
            return not self.changed.wait_for(lambda: self._closing, timeout=max(0.0, at_s - self.now_s))

    def token_due_s(self, job: Job, idx: int, patience_s: float | None) -> float | None:
        """When the idx-th token is ready; None when nothing is known of it after ``patience_s``."""
        with self.changed:
            self.changed.wait_for(lambda: self._closing or len(job.token_s) > idx, timeout=patience_s)
            return job.token_s[idx] if len(job.token_s) > idx else None

    def _steps(self) -> None:
        while True:
            with self.changed:
                if self._closing:
                    return
                now_s = self.now_s
                end_s = self.engine.step(now_s)
                self.changed.notify_all()
                if end_s is None:
                    ready_s = self.engine.next_ready_s()
                    self.changed.wait(None if ready_s is None else max(0.0, ready_s - now_s))
            if end_s is not None and not self.wait_until(end_s):
                return

    def metrics(self) -> str:
        """In vLLM's names."""
        with self.changed:
            told = [job.timings for job in self.jobs if job.done]
        lines = []
        for name, key in (("queue", "queue_ms"), ("prefill", "prompt_ms"), ("decode", "predicted_ms")):
            stem = f"vllm:request_{name}_time_seconds"
            lines += [f"{stem}_sum {sum(t[key] for t in told) / 1e3}", f"{stem}_count {len(told)}"]
        return "\n".join(lines) + "\n"


def _handler(server: LoopbackServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            dialect = server.quirks.dialect
            pages: dict[str, Any] = {"/metrics": server.metrics}
            if dialect.startswith("openai"):
                pages["/v1/models"] = {"object": "list", "data": [{"id": "mock", "owned_by": "labkit-mock"}]}
            if dialect == "tgi":
                pages["/info"] = {"model_id": "mock"}
            if dialect == "triton":
                pages["/v2"] = {"name": "triton", "extensions": ["generate"]}
            page = pages.get(self.path)
            text = str(page()) if callable(page) else json.dumps(page)
            self._whole(200 if page is not None else 404, text.encode())

        def do_POST(self) -> None:
            n_bytes = int(self.headers.get("Content-Length") or 0)
            if n_bytes > MAX_REQUEST_BYTES:
                return self._whole(413, b'{"error": "too long"}')
            try:
                ask = _ask_of(json.loads(self.rfile.read(n_bytes)))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                return self._whole(400, json.dumps({"error": repr(error)}).encode())
            if self.path != DIALECTS[server.quirks.dialect].path.format(model="mock"):
                if self.path == DIALECTS["openai-chat"].path and server.quirks.dialect == "openai-completions":
                    return self._whole(400, b'{"error": {"message": "you must provide a chat template"}}')
                return self._whole(404, b'{"error": "no such path"}')
            with contextlib.suppress(OSError):  # the reader left
                self._stream(ask)

        def _whole(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _stream(self, ask: Ask) -> None:
            q = server.quirks
            job = server.submit(ask)
            dice = random.Random(q.seed + len(server.jobs))
            server.wait_until(job.ready_s)
            self.send_response(200)
            for name, value in (("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked"),
                                ("X-Simulated", "labkit mock")):  # fmt: skip
                self.send_header(name, value)
            self.end_headers()
            writer = None
            proxy, sent = Proxy(q, dice), []

            def send(data: bytes, *, last: bool = False) -> None:
                for piece in proxy.push(data, last=last):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    self.wfile.flush()

            idx = 0
            while idx < job.n_new:
                due_s = server.token_due_s(job, idx, q.ping_s or None)
                if writer is None:
                    n_cached = job.n_cached if job.token_s else 0
                    counts = {"n_prompt_tokens": job.n_prompt_tokens, "n_cached": n_cached, "n_new": job.n_new}
                    writer = Writer(q, random_=dice, **counts)
                    send(writer.begin())
                if due_s is None:
                    if not q.ping_s:
                        return  # closing
                    send(writer.ping())
                    continue
                if not server.wait_until(due_s):
                    return
                if q.drop_after and idx >= q.drop_after:
                    self.close_connection = True
                    return
                if q.error_after and idx >= q.error_after:
                    send(writer.error(), last=True)
                    break
                send(writer.token())
                sent.append(server.now_s - job.arrived_s)
                idx += 1
            else:
                assert writer is not None, "an answer has at least one token"
                send(writer.end(job.timings), last=True)
            self.wfile.write(b"0\r\n\r\n")
            text = writer.text if writer else ""
            server.truths.append(Truth(tuple(t - job.arrived_s for t in job.token_s), tuple(sent), text))

    return Handler


def _ask_of(body: dict[str, Any]) -> Ask:
    """The request of any dialect, as far as the mock cares."""
    parameters = body.get("parameters") or {}
    n_new = body.get("max_tokens") or parameters.get("max_new_tokens") or 16
    messages = body.get("messages") or []
    text = body.get("prompt") or body.get("inputs") or body.get("text_input") or ""
    return Ask(str(text) or "\n".join(str(m["content"]) for m in messages), max(1, min(int(n_new), 100_000)))
