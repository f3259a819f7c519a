"""How long a prompt of V4's pattern of attention takes, and what the next token costs as the context grows.

    python benchmarks/long_context.py [--model random:tiny-hybrid] [--lengths 1024 4096 16384] [--steps 20]

The model has random weights: its speed is that of its shape. One prompt of the longest length goes through in the
engine's own chunks; decode steps are timed at each length, in turn, medians. Beside the clock stands the processor's
time of all threads, which other programs do not lengthen by taking turns with this one.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import labkit
from labkit.engine import PREFILL_CHUNK_TOKENS
from labkit.kvcache.contiguous import ContiguousCache
from labkit.perf.busy import BusyWatch


@torch.inference_mode()
def prefill(model: Any, n_tokens: int, room: int) -> tuple[Any, float, float]:
    """A cache that holds ``n_tokens``, and the seconds that it took by the clock and of the processor."""
    cache = ContiguousCache(model.transformer.cache_entries, capacity_tokens=room, dtype=model.dtype)
    ids = torch.arange(n_tokens) % 256
    chunk = PREFILL_CHUNK_TOKENS["cpu"]
    started, cpu = time.perf_counter(), time.process_time()
    for first in range(0, n_tokens, chunk):
        model.transformer(ids[first : first + chunk], cache, rows="last")
    return cache, time.perf_counter() - started, time.process_time() - cpu


@torch.inference_mode()
def decode(model: Any, cache: Any) -> tuple[float, float]:
    """Seconds of one token more, by both."""
    started, cpu = time.perf_counter(), time.process_time()
    model.transformer(torch.tensor([65]), cache, rows="last")
    return time.perf_counter() - started, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:tiny-hybrid")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16_384])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = labkit.load(args.model)
    prefill(model, 256, 512)
    out: dict[str, Any] = {"model": args.model, "threads": torch.get_num_threads(), "prefill": {}, "decode": {}}
    with BusyWatch() as watch:
        caches = {}
        for n in args.lengths:
            caches[n], clock_s, cpu_s = prefill(model, n, n + args.steps + 4)
            out["prefill"][n] = {"s": clock_s, "processor s": cpu_s}
        times: dict[int, list[tuple[float, float]]] = {n: [] for n in args.lengths}
        for _ in range(args.steps):
            for n, cache in caches.items():
                times[n].append(decode(model, cache))
    for n, pairs in times.items():
        clock_s, cpu_s = (median(column) for column in zip(*pairs, strict=True))
        out["decode"][n] = {"ms": clock_s * 1e3, "processor ms": cpu_s * 1e3}
    ends = [out["decode"][n] for n in (args.lengths[-1], args.lengths[0])]
    out["decode, longest / shortest"] = {unit: ends[0][unit] / ends[1][unit] for unit in ends[0]}
    out["other programs' share of the cores"] = watch.share
    print(json.dumps(out, indent=1))
    if args.json:
        args.json.write_text(json.dumps(out, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
