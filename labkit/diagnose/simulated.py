"""The mock server on a clock of its own: continuous batching step by step, and every byte has its time.

Each step either reads one waiting prompt whole (its first token comes with it) or gives every running sequence one
token, as servers without chunked prefill do. ``truth`` says when each token was made and when its bytes left.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from labkit.diagnose.dialects import Ask
from labkit.diagnose.quirks import BLOCK, N_TEMPLATE, PROXY_S, Proxy, Quirks, Writer
from labkit.diagnose.recording import Recording
from labkit.diagnose.wire import Read

PATIENCE_S = 600.0
"""The simulated client leaves after this."""


@dataclass
class Job:
    """One request inside the mock. Times on the server's clock."""

    words: tuple[str, ...]
    n_new: int
    arrived_s: float
    ready_s: float = 0.0
    begun_s: float = 0.0
    n_cached: int = 0
    token_s: list[float] = field(default_factory=list)

    @property
    def n_prompt_tokens(self) -> int:
        return len(self.words) + N_TEMPLATE

    @property
    def done(self) -> bool:
        return len(self.token_s) >= self.n_new

    @property
    def timings(self) -> dict[str, float]:
        """In llama.cpp's names, with the queue beside them."""
        first, last = self.token_s[0], self.token_s[-1]
        return {
            "cache_n": self.n_cached,
            "prompt_n": self.n_prompt_tokens - self.n_cached,
            "prompt_ms": 1e3 * (first - self.begun_s),
            "predicted_n": len(self.token_s),
            "predicted_ms": 1e3 * (last - first),
            "queue_ms": 1e3 * (self.begun_s - self.ready_s),
        }


class Engine:
    """The steps. ``submit`` a job, then ``step(now)`` until nothing is left; it says how long the step takes."""

    def __init__(self, quirks: Quirks) -> None:
        self.quirks = quirks
        self._random = random.Random(quirks.seed)
        self._seen: list[tuple[str, ...]] = []
        self._cold = quirks.cold_s > 0
        self.waiting: list[Job] = []
        self.running: list[Job] = []

    def submit(self, ask: Ask, now_s: float) -> Job:
        q = self.quirks
        n_new = min(ask.max_new_tokens, q.stops_after) if q.stops_after else ask.max_new_tokens
        job = Job(tuple(ask.text.split()), max(1, n_new), now_s)
        others_s = self._random.expovariate(1 / q.queue_s) if q.queue_s else 0.0
        cold_s, self._cold = (q.cold_s if self._cold else 0.0), False
        job.ready_s = now_s + q.fixed_s
        job.begun_s = job.ready_s + others_s + cold_s  # not before this
        self.waiting.append(job)
        return job

    def next_ready_s(self) -> float | None:
        """When the next waiting job may begin; None when nobody waits."""
        return min((job.begun_s for job in self.waiting), default=None)

    def step(self, now_s: float) -> float | None:
        """Do one step from ``now_s``; its end, or None when there is nothing to do at this time."""
        ready = [job for job in self.waiting if job.begun_s <= now_s]
        if ready and len(self.running) < self.quirks.n_slots:
            return self._prefill(min(ready, key=lambda job: job.begun_s), now_s)
        return self._decode(now_s) if self.running else None

    def _prefill(self, job: Job, now_s: float) -> float:
        self.waiting.remove(job)
        job.begun_s = now_s
        job.n_cached = self._reused(job.words)
        end_s = now_s + self._noise() * (job.n_prompt_tokens - job.n_cached) / self.quirks.prefill_tok_s
        job.token_s.append(end_s)
        if not job.done:
            self.running.append(job)
        return end_s

    def _decode(self, now_s: float) -> float:
        q, n = self.quirks, len(self.running)
        context = sum(job.n_prompt_tokens + len(job.token_s) for job in self.running)
        took = q.decode_s + q.sequence_s * (n - 1) + q.context_s * context / 1000
        end_s = now_s + self._noise() * took
        for job in self.running:
            job.token_s.append(end_s)
        self.running = [job for job in self.running if not job.done]
        return end_s

    def _reused(self, words: tuple[str, ...]) -> int:
        if not self.quirks.prefix_cache:
            return 0
        best = 0
        for seen in self._seen:
            same = next(
                (i for i, (a, b) in enumerate(zip(seen, words, strict=False)) if a != b), min(len(seen), len(words))
            )
            best = max(best, same)
        self._seen.append(words)
        return best // BLOCK * BLOCK

    def _noise(self) -> float:
        return max(0.2, self._random.gauss(1.0, self.quirks.jitter)) if self.quirks.jitter else 1.0


@dataclass(frozen=True)
class Truth:
    """What really happened to one request, in seconds since it was sent."""

    made_s: tuple[float, ...]
    """When each token was made."""
    sent_s: tuple[float, ...]
    """When the last byte of the event with each token left the proxy."""
    text: str


class SimulatedServer:
    """A target for probes that needs no network and no time. ``truths[i]`` belongs to the i-th recording."""

    def __init__(self, quirks: Quirks | None = None) -> None:
        self.quirks = quirks or Quirks()
        self.truths: list[Truth] = []
        self.now_s = 0.0
        self._engine = Engine(self.quirks)
        self._random = random.Random(self.quirks.seed + 1)
        self.url = "simulated"

    def record(self, ask: Ask) -> Recording:
        return self.record_all([ask])[0]

    def record_all(self, asks: Sequence[Ask]) -> list[Recording]:
        """All sent at the same moment."""
        jobs = [self._engine.submit(ask, self.now_s) for ask in asks]
        while not all(job.done for job in jobs):
            end_s = self._engine.step(self.now_s)
            if end_s is None:
                end_s = self._engine.next_ready_s()
                assert end_s is not None, "a job that is not done waits or runs"
            self.now_s = max(self.now_s, end_s)
        return [self._answer(ask, job) for ask, job in zip(asks, jobs, strict=True)]

    def _answer(self, ask: Ask, job: Job) -> Recording:
        pieces, sent_s, writer, broken = self._written(job)
        begin = job.arrived_s
        reads = read_by(pieces, self.quirks.client_s, begin)
        self.truths.append(Truth(tuple(t - begin for t in job.token_s), tuple(t - begin for t in sent_s), writer.text))
        headers_s = job.ready_s - begin
        end_s = max([headers_s, *(read.at_s for read in reads)])
        recording = Recording(
            reads=reads,
            end_s=end_s,
            ended="dropped" if broken else "closed",
            error="the stream broke off: what came before is kept." if broken else None,
            status=200,
            headers={"content-type": "text/event-stream", "server": "labkit-mock"},
            marks={"connected": 0.0, "sent": 0.0, "headers": headers_s},
            url=self.url,
            dialect=self.quirks.dialect,
            max_new_tokens=ask.max_new_tokens,
            n_prompt_chars=len(ask.text),
            meta=dict(ask.meta) | {"sent_s": 0.0},
            source="simulated",
        )
        return recording

    def _written(self, job: Job) -> tuple[list[tuple[float, bytes]], list[float], Writer, bool]:
        """(pieces with their times, when each token's event left, the writer, whether the connection broke)."""
        q = self.quirks
        n_prompt, n_cached = job.n_prompt_tokens, job.n_cached
        writer = Writer(q, n_prompt_tokens=n_prompt, n_cached=n_cached, n_new=job.n_new, random_=self._random)
        proxy = Proxy(q, self._random)
        pieces: list[tuple[float, bytes]] = []
        ends: list[int] = []  # the byte with which each token's event is complete
        n_written, n_waiting = 0, 0

        def send(at_s: float, data: bytes, *, last: bool = False) -> None:
            nonlocal n_written
            n_written += len(data)
            pieces.extend((at_s + k * PROXY_S, piece) for k, piece in enumerate(proxy.push(data, last=last)))

        def close(broken: bool) -> tuple[list[tuple[float, bytes]], list[float], Writer, bool]:
            return pieces, _when(pieces, ends), writer, broken

        send(job.ready_s, writer.begin())
        before_s = job.ready_s
        for n, at_s in enumerate(job.token_s, 1):
            while q.ping_s and at_s - before_s > q.ping_s:
                before_s += q.ping_s
                send(before_s, writer.ping())
            if q.drop_after and n > q.drop_after:
                return close(True)
            if q.error_after and n > q.error_after:
                send(at_s, writer.error(), last=True)
                return close(False)
            data, before_s, n_waiting = writer.token(), at_s, n_waiting + 1
            send(at_s, data)
            if data:
                ends += [n_written - len(q.line_end)] * n_waiting
                n_waiting = 0
        send(job.token_s[-1], writer.end(job.timings), last=True)
        return close(False)


def _when(pieces: list[tuple[float, bytes]], ends: list[int]) -> list[float]:
    """When each of these bytes left; those that never did are left out."""
    found, n_sent = [], 0
    for at_s, data in pieces:
        n_sent += len(data)
        found += [at_s] * (sum(end <= n_sent for end in ends) - len(found))
    return found


def read_by(pieces: list[tuple[float, bytes]], client_s: float, begin_s: float) -> tuple[Read, ...]:
    """What a client reads that needs ``client_s`` for each event: what has come meanwhile comes as one."""
    reads: list[Read] = []
    free_s, at = begin_s, 0
    while at < len(pieces):
        came_s = max(pieces[at][0], free_s)
        data = b""
        while at < len(pieces) and pieces[at][0] <= came_s and (client_s or not data):
            data, at = data + pieces[at][1], at + 1
        reads.append(Read(came_s - begin_s, data, free_s - begin_s))
        n_events = data.count(b"data:")
        free_s = came_s + client_s * n_events
    return tuple(reads)
