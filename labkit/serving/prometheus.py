"""A service's counters as Prometheus text, under vLLM's names where it has one: its dashboards then fit.

https://prometheus.io/docs/instrumenting/exposition_formats
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from itertools import pairwise

from labkit.serving.figures import timing_of
from labkit.serving.request import Request
from labkit.serving.service import Service

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)

HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("From arrival to the first token.", SECONDS),
    "vllm:inter_token_latency_seconds": ("From one token to the next.", SECONDS),
    "vllm:e2e_request_latency_seconds": ("From arrival to the last token.", SECONDS),
    "vllm:request_queue_time_seconds": ("From arrival to the first step.", SECONDS),
    "vllm:request_prefill_time_seconds": ("From the first step to the first token.", SECONDS),
    "vllm:request_decode_time_seconds": ("From the first token to the last.", SECONDS),
    "vllm:request_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "vllm:request_generation_tokens": ("Tokens of an answer.", TOKENS),
}


class Histogram:
    """Counts by upper bound.

    >>> seen = Histogram((1.0, 2.0))
    >>> seen.add(1.5), seen.add(9.0)
    (None, None)
    >>> seen.counts, seen.total
    ([0, 1, 1], 10.5)
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str, labels: str) -> list[str]:
        out, so_far = [], 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            so_far += count
            le = bound if isinstance(bound, str) else f"{float(bound)}"
            out.append(f'{name}_bucket{{{labels},le="{le}"}} {so_far}')
        return [*out, f"{name}_sum{{{labels}}} {self.total}", f"{name}_count{{{labels}}} {so_far}"]


class Metrics:
    """What ``/metrics`` says of a service; told of each request that ends."""

    def __init__(self, service: Service, model_name: str) -> None:
        self.service = service
        escaped = model_name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self.labels = f'model_name="{escaped}",engine="0"'
        self._lock = threading.Lock()
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self._reasons: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self._prompt = self._generated = self._queried = self._shared = 0
        service.on_end.append(self.count)

    def count(self, request: Request) -> None:
        timing, sequence = timing_of(request), request.sequence
        reason = {"stop": "stop", "length": "length", "cancelled": "abort"}.get(str(sequence.finish_reason), "error")
        with self._lock:
            self._reasons[reason] += 1
            if request.started_s is None:
                return
            self._prompt += timing.n_prompt
            self._generated += timing.n_tokens
            self._queried += timing.n_prompt
            self._shared += request.n_shared
            add = {name.removeprefix("vllm:"): histogram.add for name, histogram in self._histograms.items()}
            add["request_queue_time_seconds"](timing.queue_s)
            add["e2e_request_latency_seconds"](timing.e2e_s)
            add["request_prompt_tokens"](timing.n_prompt)
            add["request_generation_tokens"](timing.n_tokens)
            if timing.ttft_s is not None:
                add["time_to_first_token_seconds"](timing.ttft_s)
                add["request_prefill_time_seconds"](timing.ttft_s - timing.queue_s)
                add["request_decode_time_seconds"](sequence.token_s[-1] - sequence.token_s[0])
            for a, b in pairwise(sequence.token_s):
                add["inter_token_latency_seconds"](b - a)

    def render(self) -> str:
        """The exposition text."""
        queues, cache = self.service.queues, self.service.engine.cache
        n_blocks = getattr(cache, "n_blocks", 0)
        used = cache.allocator.n_used / n_blocks if n_blocks else len(queues.running) / queues.max_running
        with self._lock:
            single = {
                "vllm:num_requests_running": ("gauge", "Requests in the running batch.", len(queues.running)),
                "vllm:num_requests_waiting": ("gauge", "Requests that wait.", self.service.n_waiting),
                "vllm:kv_cache_usage_perc": ("gauge", "Share of the blocks in use; 1 is all.", used),
                "vllm:num_preemptions_total": ("counter", "Preemptions.", queues.n_preemptions),
                "vllm:prompt_tokens_total": ("counter", "Tokens of prompts of ended requests.", self._prompt),
                "vllm:generation_tokens_total": ("counter", "Tokens of answers that ended.", self._generated),
                "vllm:prefix_cache_queries_total": ("counter", "Prompt tokens looked for.", self._queried),
                "vllm:prefix_cache_hits_total": ("counter", "Prompt tokens found stored.", self._shared),
            }
            lines = []
            for name, (kind, text, value) in single.items():
                lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name}{{{self.labels}}} {value}"]
            name = "vllm:request_success_total"
            lines += [f"# HELP {name} Requests that ended, by reason.", f"# TYPE {name} counter"]
            lines += [f'{name}{{{self.labels},finished_reason="{r}"}} {n}' for r, n in self._reasons.items()]
            for name, histogram in self._histograms.items():
                lines += [f"# HELP {name} {HISTOGRAMS[name][0]}", f"# TYPE {name} histogram"]
                lines += histogram.lines(name, self.labels)
        return "\n".join(lines) + "\n"
