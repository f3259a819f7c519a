"""What a server counts about itself beside the stream: Prometheus metrics, trtllm-serve's records.

Read before and after the probes; the difference belongs to the requests between, others' included. Asked only at the
address that is probed.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import httpx

from labkit.diagnose.endpoint import CONNECT_S, MAX_BODY_BYTES, Endpoint, is_loopback

NAMES = {
    "vllm:request_queue_time_seconds": "queue_s",
    "vllm:request_prefill_time_seconds": "prefill_s",
    "vllm:request_decode_time_seconds": "decode_s",
    "vllm:time_to_first_token_seconds": "ttft_s",
    "vllm:inter_token_latency_seconds": "itl_s",
    "vllm:time_per_output_token_seconds": "itl_s",
    "sglang:queue_time_seconds": "queue_s",
    "sglang:time_to_first_token_seconds": "ttft_s",
    "sglang:inter_token_latency_seconds": "itl_s",
    "tgi_request_queue_duration": "queue_s",
    "tgi_request_inference_duration": "inference_s",
    "tgi_request_mean_time_per_token_duration": "itl_s",
    "trtllm_time_to_first_token_seconds": "ttft_s",
    "trtllm_inter_token_latency_seconds": "itl_s",
    "trtllm_request_queue_time_seconds": "queue_s",
}
"""Histogram -> what it holds; each has a _sum and a _count."""
TOTALS = {
    "llamacpp:prompt_seconds_total": ("prompt_token_s", "sum"),
    "llamacpp:prompt_tokens_total": ("prompt_token_s", "count"),
    "llamacpp:tokens_predicted_seconds_total": ("itl_s", "sum"),
    "llamacpp:tokens_predicted_total": ("itl_s", "count"),
}
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+([-+.\deE]+|NaN)", re.MULTILINE)
Sums = dict[str, tuple[float, float]]
"""What -> (sum, count)."""


def parse(text: str) -> Sums:
    """The histograms' sums and counts out of Prometheus' text format, all label sets together.

    >>> parse('vllm:request_queue_time_seconds_sum{a="b"} 1.5\\nvllm:request_queue_time_seconds_count{a="b"} 3')
    {'queue_s': (1.5, 3.0)}
    """
    found: dict[str, list[float]] = {}
    for name, value in _LINE.findall(text):
        number = float(value)
        if number != number:
            continue
        what, part = TOTALS.get(name, (None, ""))
        if what is None:
            stem, _, part = name.rpartition("_")
            what = NAMES.get(stem)
        if what is not None and part in ("sum", "count"):
            found.setdefault(what, [0.0, 0.0])[part == "count"] += number
    return {name: (sums[0], sums[1]) for name, sums in found.items()}


def parse_trtllm(records: Any) -> Sums:
    """trtllm-serve's /perf_metrics: a list of requests, each with its moments."""
    found: dict[str, list[float]] = {}
    for record in records if isinstance(records, list) else []:
        times = ((record.get("perf_metrics") or {}).get("timing_metrics") or {}) if isinstance(record, dict) else {}
        moments: list[Any] = [
            times.get(f"{name}_time") for name in ("arrival", "first_scheduled", "first_token", "last_token")
        ]
        if not all(isinstance(moment, int | float) for moment in moments):
            continue
        for what, (a, b) in zip(("queue_s", "prefill_s", "decode_s"), pairwise(moments), strict=True):
            sums = found.setdefault(what, [0.0, 0.0])
            sums[0], sums[1] = sums[0] + b - a, sums[1] + 1
    return {name: (sums[0], sums[1]) for name, sums in found.items()}


def between(before: Sums, after: Sums) -> dict[str, float]:
    """Means of what was counted between two readings."""
    found = {}
    for what, (total, count) in after.items():
        was, n_was = before.get(what, (0.0, 0.0))
        if count > n_was and total >= was:
            found[what] = (total - was) / (count - n_was)
    return found


def read(endpoint: Endpoint) -> Sums:
    """What the server counts at this moment; empty when it shows nothing."""
    timeout = httpx.Timeout(3.0, connect=CONNECT_S)
    options: dict[str, Any] = {
        "timeout": timeout,
        "verify": endpoint.verify,
        "trust_env": not is_loopback(endpoint.url),
    }
    headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    with httpx.Client(**options) as http:
        for path in ("/metrics", "/prometheus/metrics"):
            if found := parse(_get(http, endpoint.base + path, headers)):
                return found
        try:
            return parse_trtllm(json.loads(_get(http, f"{endpoint.base}/perf_metrics", headers) or "null"))
        except ValueError:
            return {}


def _get(http: httpx.Client, url: str, headers: dict[str, str]) -> str:
    body = b""
    try:
        with http.stream("GET", url, headers=headers) as answer:
            if answer.status_code != 200:
                return ""
            for data in answer.iter_bytes():
                body += data
                if len(body) > MAX_BODY_BYTES:
                    return ""
    except httpx.HTTPError:
        return ""
    return body.decode("utf-8", errors="replace")
