"""One command for a machine with an NVIDIA GPU, under 8 minutes: are the kernels right there, and how fast?

    python benchmarks/gpu_check.py            skips cleanly, and says so, where there is no GPU

1. every Triton kernel against plain PyTorch on the device
2. whole runs: the captured step and every KV cache give the reference's tokens (float32, SmolLM2's shape)
3. measured ceilings: copy bandwidth, matmul rate
4. SmolLM2's and Llama-2-7B's shapes with random weights: decode in the half-width dtype, int8 and int4; prefill

Nothing is downloaded. Writes gpu_check.json. Ends with status 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SMALL, LARGE = "random:smollm2-135m", "random:llama-2-7b"
PROMPT = "The capital of France is"


def seconds(function: Callable[[], Any], repeats: int = 5) -> float:
    """Median time of ``function``, the device drained before and after."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times[1:])


def kernels() -> dict[str, str]:
    """Each case of tests/kernels/triton_cases.py, in processes side by side: most of their time is compiling."""
    from tests.kernels import triton_cases

    script = str(ROOT / "tests/kernels/triton_cases.py")
    running = {
        case.__name__: subprocess.Popen(
            [sys.executable, script, "cuda", case.__name__], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for case in triton_cases.CASES
    }
    found = {}
    for name, process in running.items():
        output, _ = process.communicate()
        found[name] = "ok" if process.returncode == 0 else output[-1500:]
    return found


def runs() -> dict[str, str]:
    """Tokens of whole runs against the reference with a contiguous cache; lossy caches only have to run."""
    import labkit
    from labkit import registry

    model = labkit.load(SMALL, device="cuda", dtype="fp32", weights="plain")

    def tokens(**switches: Any) -> Any:
        done = labkit.Pipeline(model, **switches).generate(PROMPT * 20, max_new_tokens=40, ignore_eos=True)
        return done.token_ids, done.trace

    kinds = [kind.name for kind in registry.components("kv_cache") if kind.unavailable is None]
    wanted, _ = tokens(backend="reference")
    found = {}
    for switches in [
        {"backend": "cuda-graph"},
        *({"kv_cache": kind, "backend": "reference"} for kind in kinds),
    ]:
        name = " ".join(switches.values())
        try:
            got, trace = tokens(**switches)
        except Exception as error:  # noqa: BLE001 - reported, and counted as wrong
            found[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        exact = name.split()[0] not in ("int8", "int4", "sliding")
        same = sum(a == b for a, b in zip(got, wanted, strict=True))
        covered = sum(sum(step.phases.values()) for step in trace.steps) / trace.wall_s
        verdict = "ok" if not exact or got == wanted else "WRONG"
        found[name] = f"{verdict}: {same} of {len(wanted)} tokens, phases {covered:.1%} of the wall clock"
    return found


def ceilings(dtype: torch.dtype) -> dict[str, float]:
    """Bytes a second read and written by a copy, and floating-point operations a second of a large product."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a = torch.randn(8192, 8192, device="cuda", dtype=dtype)
    return {
        "copy_bytes_s": 2 * source.numel() / seconds(lambda: target.copy_(source)),
        "matmul_flops_s": 2 * 8192**3 / seconds(lambda: a @ a),
    }


def measure(name: str, weights: Any, dtype: str, limits: dict[str, float], n_new: int = 64) -> dict[str, Any]:
    """Decode and prefill of one shape; shares of the measured ceilings."""
    import labkit
    from labkit import backends
    from labkit.kvcache.contiguous import ContiguousCache
    from labkit.perf.timer import NULL_TIMER

    model = labkit.load(name, device="cuda", dtype=dtype, weights=weights or "plain")
    transformer = model.transformer
    never = {"timer": NULL_TIMER, "should_stop": lambda: False}
    row: dict[str, Any] = {"model": name, "weights": weights or dtype}
    n_linear = sum(
        int(m.in_features) * int(m.out_features)  # type: ignore[arg-type]
        for m in transformer.layers.modules()
        if hasattr(m, "in_features")
    )
    for n_prompt in (256, 2048):
        cache = ContiguousCache(
            transformer.cache_entries, capacity_tokens=n_prompt + 8 * n_new, device="cuda", dtype=model.dtype
        )
        step: Any = backends.bind("cuda-graph", transformer=transformer, cache=cache)[1]
        if step.computed_by != "cuda-graph":
            raise RuntimeError(step.reason)
        ids = torch.randint(0, model.config.vocab_size, (n_prompt,), device="cuda")

        def prefill(cache: Any = cache, step: Any = step, ids: Any = ids) -> None:
            cache.reset()
            step(ids, **never)

        with torch.inference_mode():
            prefill_s = seconds(prefill, 3)
            step(ids[:1], **never)  # captures the graph
            decode_s = seconds(lambda step=step, ids=ids: step.decode_many(ids[:1], n_new), 3) / n_new
        row[f"decode tok/s after {n_prompt}"] = round(1 / decode_s, 1)
        row[f"of bandwidth after {n_prompt}"] = round(model.nbytes / decode_s / limits["copy_bytes_s"], 3)
        row[f"prefill tok/s, {n_prompt}"] = round(n_prompt / prefill_s)
        row[f"of matmul, {n_prompt}"] = round(2 * n_linear * n_prompt / prefill_s / limits["matmul_flops_s"], 3)
    row["kernels, us a token"] = profile(lambda: step.decode_many(ids[:1], 16), 16)
    labkit.Pipeline(model).generate(PROMPT, max_new_tokens=8, ignore_eos=True)
    done = labkit.Pipeline(model).generate(PROMPT, max_new_tokens=128, ignore_eos=True)
    row["tok/s through Pipeline"] = round(1 / median(done.trace.itl_s), 1)
    row["ttft ms through Pipeline"] = round(1e3 * (done.trace.ttft_s or 0.0), 2)
    return row


def profile(function: Callable[[], Any], n_tokens: int) -> dict[str, float]:
    """Microseconds of each kernel in one token, the largest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    with torch.inference_mode(), watch(activities=[ProfilerActivity.CUDA]) as seen:
        function()
        torch.cuda.synchronize()
    found = {event.key[:40]: event.device_time_total / n_tokens for event in seen.key_averages()}
    return {name: round(us, 1) for name, us in sorted(found.items(), key=lambda item: -item[1])[:8]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--only", nargs="+", choices=["kernels", "runs", "speed"], default=["kernels", "runs", "speed"])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA device here (torch.cuda.is_available() is False).")
        return
    began = time.perf_counter()
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(report["device"], flush=True)
    wrong = False
    for name, check in (("kernels", kernels), ("runs", runs)):
        if name in options.only:
            report[name] = found = check()
            wrong |= any(not text.startswith("ok") for text in found.values())
            for case, text in found.items():
                print(f"{name:8s} {case:28s} {text}", flush=True)
            print(f"         {time.perf_counter() - began:.0f} s", flush=True)
    if "speed" in options.only:
        wide = torch.cuda.get_device_capability()[0] >= 8
        dtype = "bf16" if wide else "fp16"
        report["ceilings"] = limits = ceilings(torch.bfloat16 if wide else torch.float16)
        gb_s, tflop_s = limits["copy_bytes_s"] / 1e9, limits["matmul_flops_s"] / 1e12
        print(f"copy {gb_s:.0f} GB/s, matmul {tflop_s:.0f} TFLOP/s ({dtype})", flush=True)
        report["rows"] = rows = []
        names = [SMALL, LARGE] if torch.cuda.get_device_properties(0).total_memory > 20e9 else [SMALL]
        for name in names:
            for weights in (None, "int8", "int4"):
                try:
                    row = measure(name, weights, dtype, limits)
                except Exception as error:  # noqa: BLE001 - reported, and counted as wrong
                    row = {"model": name, "weights": weights or dtype, "error": repr(error)[:800]}
                    wrong = True
                torch.cuda.empty_cache()
                rows.append(row)
                print(json.dumps(row), flush=True)
    report["seconds"] = time.perf_counter() - began
    options.out.write_text(json.dumps(report, indent=1))
    print(f"done in {report['seconds']:.0f} s; written: {options.out}")
    if wrong:
        sys.exit("something is wrong above: please report it with gpu_check.json.")


if __name__ == "__main__":
    main()
