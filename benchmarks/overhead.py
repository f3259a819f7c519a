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

import torch

import labkit
from labkit import backends, registry
from labkit.perf.timer import NULL_TIMER, Timer


def timer_cost(model: labkit.Model, backend: str, n_steps: int) -> tuple[float, float]:
    """Median seconds of a decode step without and with the timer."""
    build_cache = registry.find("kv_cache", "contiguous")[0].build
    transformer = model.transformer
    cache = build_cache(
        None, layers=transformer.cache_entries, capacity_tokens=64 + 2 * n_steps, device=model.device, dtype=model.dtype
    )
    _, step = backends.bind(backend, transformer=transformer, cache=cache)
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
    differences = [on - off for off, on in zip(took[False], took[True], strict=True)]  # neighbours in time
    return median(took[False]), median(took[False]) + median(differences)


IMPORT = "import torch, time; t = time.perf_counter(); import labkit; labkit.load; labkit.Pipeline"
LOAD = """
import sys, time, labkit
labkit.load
began = time.perf_counter()
labkit.load({options})
took = time.perf_counter() - began
sys.path.insert(0, {folder!r})
from _process import peak_bytes
print(took, peak_bytes())
"""


def import_cost_s() -> float:
    """Seconds that ``import labkit`` and its first names take after torch, in a fresh process; the best of three."""
    code = IMPORT + "; print(time.perf_counter() - t)"
    return min(float(_fresh(code)) for _ in range(3))


def cold_load(options: str) -> tuple[float, int]:
    """Seconds of ``labkit.load(options)`` after the import, and the peak bytes: medians of five fresh processes."""
    runs = [_fresh(LOAD.format(options=options, folder=str(Path(__file__).parent))).split() for _ in range(5)]
    return median(float(took) for took, _ in runs), int(median(int(peak) for _, peak in runs))


def _fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("overhead.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backends.prepare("fused")
    rows = []
    for weights in ("stored", "plain", "int8", "int4"):
        model = labkit.load(weights=weights)
        for backend in ("reference", "fused"):
            n_steps = options.steps if backend == "fused" else max(options.steps // 3, 10)
            off, on = timer_cost(model, backend, n_steps)
            pipeline = labkit.Pipeline(model, backend=backend)
            trace = pipeline.generate("The history of the steam engine", max_new_tokens=32, ignore_eos=True).trace
            rows.append(
                {"weights": weights, "backend": backend, "off_ms": off * 1e3,
                 "on_ms": on * 1e3, "cost": on / off - 1, "coverage": trace.coverage}
            )  # fmt: skip
            print(
                f"{rows[-1]['weights']:>9} {backend:>9}: step {off * 1e3:.2f} ms off, {on * 1e3:.2f} ms on, "
                f"timer {rows[-1]['cost']:+.2%}, coverage {trace.coverage:.2%}"
            )
    loads = []
    for arguments in (
        "",
        "weights='plain', dtype='fp32'",
        "weights='plain', dtype='bf16'",
        "weights='int8'",
        "weights='int4'",
    ):
        load_s, peak = cold_load(arguments)
        loads.append({"options": arguments, "load_s": load_s, "peak_bytes": peak})
        print(f"labkit.load({arguments}) in a fresh process: {load_s:.2f} s, peak memory {peak / 1e6:.0f} MB")
    cost_s = import_cost_s()
    print(f"import labkit after torch, with the names it loads lazily: {cost_s:.2f} s")
    options.out.write_text(json.dumps({"rows": rows, "loads": loads, "import_s": cost_s}, indent=1))


if __name__ == "__main__":
    main()
