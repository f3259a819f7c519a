"""What watching costs, and how much of the clock it explains.

    python benchmarks/overhead.py

Hooks off and hooks on run in turn, step by step, in one process; medians are compared. Also printed: the share of
the wall clock inside named phases, what ``import labkit`` adds to torch's own import, load time, and peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import psutil
import torch

import labkit
from labkit import registry
from labkit.kernels import backends
from labkit.perf.timer import NULL_TIMER, Timer


def timer_cost(model: labkit.Model, backend: str, n_steps: int) -> tuple[float, float]:
    """Median seconds of a decode step without and with the timer."""
    component, config = registry.find("backend", backend)
    build_cache = registry.find("kv_cache", "contiguous")[0].build
    transformer = model.transformer
    cache = build_cache(
        None, layers=transformer.cache_entries, capacity_tokens=64 + 2 * n_steps, device=model.device, dtype=model.dtype
    )
    step = component.build(config, transformer=transformer, cache=cache)
    timer = Timer()
    timer.begin()
    took: dict[bool, list[float]] = {False: [], True: []}
    with torch.inference_mode():
        step(torch.arange(64), timer=NULL_TIMER, should_stop=lambda: False)
        for i in range(2 * n_steps):
            watched = i % 2 == 1
            began = time.perf_counter()
            if watched:
                timer.begin_step("decode")
            step(torch.tensor([100 + i]), timer=timer if watched else NULL_TIMER, should_stop=lambda: False)
            if watched:
                timer.end_step()
            took[watched].append(time.perf_counter() - began)
    return median(took[False]), median(took[True])


def import_cost_s() -> float:
    """Seconds that ``import labkit`` takes after torch, in a fresh process; the best of three."""
    code = "import torch, time; t = time.perf_counter(); import labkit; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    return min(float(run.stdout) for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("overhead.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backends.prepare("fused")
    rows = []
    for weights in (None, "int8", "int4"):
        began = time.perf_counter()
        model = labkit.load(weights=weights)
        load_s = time.perf_counter() - began
        for backend in ("reference", "fused"):
            n_steps = options.steps if backend == "fused" else max(options.steps // 5, 10)
            off, on = timer_cost(model, backend, n_steps)
            pipeline = labkit.Pipeline(model, backend=backend)
            trace = pipeline.generate("The history of the steam engine", max_new_tokens=32, ignore_eos=True).trace
            rows.append(
                {"weights": weights or "as stored", "backend": backend, "load_s": load_s, "off_ms": off * 1e3,
                 "on_ms": on * 1e3, "cost": on / off - 1, "coverage": trace.coverage}
            )  # fmt: skip
            print(
                f"{rows[-1]['weights']:>9} {backend:>9}: step {off * 1e3:.2f} ms off, {on * 1e3:.2f} ms on, "
                f"timer {rows[-1]['cost']:+.2%}, coverage {trace.coverage:.2%}, load {load_s:.2f} s"
            )
    peak = psutil.Process().memory_info()
    peak_bytes = getattr(peak, "peak_wset", None) or _peak_bytes()
    cost_s = import_cost_s()
    print(f"import labkit after torch: {cost_s:.2f} s; peak memory of this process: {peak_bytes / 1e9:.2f} GB")
    options.out.write_text(json.dumps({"rows": rows, "import_s": cost_s, "peak_bytes": peak_bytes}, indent=1))


def _peak_bytes() -> int:
    """The most memory this process held, where the system says (KiB on Linux, bytes on macOS)."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
