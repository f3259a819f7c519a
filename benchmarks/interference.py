"""What others do to a run on a CPU: how soon it stops when asked, and how it decodes beside a busy process.

    python benchmarks/interference.py [--weights int8] [--dtype fp32] [--share 0.6 0.9] [--json FILE]

Stop    a prompt of 4,000 tokens is stopped after various times: milliseconds until the run has ended
decode  another process takes a share of one core: milliseconds a token, with all threads always and with
        ``labkit.kernels.cpu.active_threads``'s choice, taking turns
prompts a bf16 model without a KV cache, so that every step is a prompt, alone and beside two busy loops
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics
from statistics import median
from typing import Any

import labkit
from labkit import backends
from labkit.kernels.cpu import active_threads
from labkit.perf.trace import quantile

NEIGHBOUR = """
import sys, time
share = float(sys.argv[1])
while True:
    until = time.perf_counter() + 0.01 * share
    while time.perf_counter() < until: pass
    time.sleep(0.01 * (1 - share))
"""


@contextlib.contextmanager
def neighbour(share: float) -> Iterator[None]:
    """Another process that takes this share of one core."""
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR, str(share)])
    time.sleep(0.5)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def stopping(pipeline: Any) -> dict[str, Any]:
    """Milliseconds from ``stop()`` to the end of the run, within a long prompt."""
    model = pipeline.model
    prompt = model.tokenizer.decode(model.tokenizer.encode("\n".join(topics.topics.values())[:40_000])[:4000])
    took = []
    for wait_s in (0.2, 0.3, 0.5, 0.8, 1.0, 1.3, 1.7, 2.1):
        run = pipeline.run(prompt, max_new_tokens=2)
        time.sleep(wait_s)
        began = time.perf_counter()
        run.stop()
        if run.result().finish_reason == "cancelled":
            took.append(1e3 * (time.perf_counter() - began))
    return {"stop ms": median(took), "from": min(took), "to": max(took), "runs": len(took)}


def decoding(pipeline: Any, share: float, rounds: int) -> dict[str, Any]:
    """Milliseconds a token beside a neighbour, all threads and as many as pay, A B A B."""
    busy, found = active_threads.BUSY, {"all threads": [], "as many as pay": []}
    with neighbour(share) if share else contextlib.nullcontext():
        for _ in range(rounds):
            for name, times in found.items():
                active_threads.BUSY = busy if name == "as many as pay" else 2.0  # a share that nobody reaches
                chooser = threads_of(pipeline)
                chooser.n_active = 0
                done = pipeline.generate("Once upon a time", max_new_tokens=120, ignore_eos=True)
                times += done.trace.itl_s[20:]  # the first ones are still choosing
    active_threads.BUSY = busy
    row: dict[str, Any] = {"neighbour's share of a core": share}
    for name, times in found.items():
        row[name] = 1e3 * median(times)
        row[f"{name}, quartiles"] = [round(1e3 * quantile(times, q), 1) for q in (0.25, 0.75)]
    return row


def prompts(n_neighbours: int) -> dict[str, Any]:
    """Milliseconds a token and the phases' shares, without a KV cache, beside so many processes that never wait."""
    model = labkit.load(device="cpu", dtype="bf16", weights="plain")
    pipeline = labkit.Pipeline(model, backend="fused", kv_cache="none")
    pipeline.generate("Once upon a time", max_new_tokens=2)
    with contextlib.ExitStack() as stack:
        for _ in range(n_neighbours):
            stack.enter_context(neighbour(1.0))
        trace = pipeline.generate("Once upon a time", max_new_tokens=25, ignore_eos=True).trace
    shares: dict[str, float] = {}
    for step in trace.steps:
        for name, seconds in step.phases.items():
            shares[name] = shares.get(name, 0.0) + seconds / trace.wall_s
    row: dict[str, Any] = {"no KV cache, busy loops beside": n_neighbours, "ms a token": 1e3 * median(trace.itl_s)}
    row |= {"longest": 1e3 * max(trace.itl_s)}
    return row | {f"{name} %": round(100 * share) for name, share in sorted(shares.items(), key=lambda s: -s[1])[:4]}


def threads_of(pipeline: Any) -> Any:
    from labkit.kernels.cpu import plan

    return plan.plan(pipeline.model.transformer).active


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="plain")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--share", nargs="*", type=float, default=[0.0, 0.6, 0.9])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pipeline = labkit.Pipeline(labkit.load(device="cpu", dtype=options.dtype, weights=options.weights), backend="fused")
    backends.prepare("fused")
    pipeline.generate("Once upon a time", max_new_tokens=16)
    rows = [stopping(pipeline), *(decoding(pipeline, share, options.rounds) for share in options.share)]
    rows += [prompts(n) for n in (0, 2)]
    for row in rows:
        print(", ".join(f"{k} {round(v, 1) if isinstance(v, float) else v}" for k, v in row.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
