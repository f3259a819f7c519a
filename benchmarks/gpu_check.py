"""One command for a machine with an NVIDIA GPU, under 8 minutes: are the kernels right there, and how fast?

    python benchmarks/gpu_check.py            skips cleanly, and says so, where there is no GPU

1. every Triton kernel against plain PyTorch on the device    2. measured ceilings: copy bandwidth, matmul rate
3. the Llama-2-7B shape with random weights: decode in the half-width dtype and in int4, prefill
4. SmolLM2's shape: decode at batch 1                         Writes gpu_check.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


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


def ceilings(dtype: torch.dtype) -> dict[str, float]:
    """Bytes a second read and written by a copy, and floating-point operations a second of a large product."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a = torch.randn(8192, 8192, device="cuda", dtype=dtype)
    return {
        "copy_bytes_s": 2 * source.numel() / seconds(lambda: target.copy_(source)),
        "matmul_flops_s": 2 * 8192**3 / seconds(lambda: a @ a),
    }


def measure(name: str, weights: Any, dtype: str, limits: dict[str, float], n_new: int, n_prompt: int) -> dict[str, Any]:
    """Decode and prefill of one shape; shares of the measured ceilings."""
    import labkit
    from labkit.kernels import backends
    from labkit.kvcache.contiguous import ContiguousCache
    from labkit.perf.timer import NULL_TIMER

    model = labkit.load(name, device="cuda", dtype=dtype, weights=weights)
    transformer = model.transformer
    cache = ContiguousCache(
        transformer.cache_entries, capacity_tokens=n_prompt + 8 * n_new, device="cuda", dtype=model.dtype
    )
    step = backends.build_cuda_graph(None, transformer=transformer, cache=cache)
    if step.computed_by != "cuda-graph":
        raise RuntimeError(step.reason)
    ids = torch.randint(0, model.config.vocab_size, (n_prompt,), device="cuda")
    never = {"timer": NULL_TIMER, "should_stop": lambda: False}

    def prefill() -> None:
        cache.reset()
        step(ids, **never)

    with torch.inference_mode():
        prefill_s = seconds(prefill, 3)
        step(ids[:1], **never)  # captures the graph
        decode_s = seconds(lambda: step.decode_many(ids[:1], n_new), 3) / n_new
    n_linear = sum(
        int(m.in_features) * int(m.out_features)  # type: ignore[arg-type]
        for m in transformer.layers.modules()
        if hasattr(m, "in_features")
    )
    return {
        "model": name,
        "weights": weights or dtype,
        "decode_tok_s": 1 / decode_s,
        "decode_of_bandwidth": model.nbytes / decode_s / limits["copy_bytes_s"],
        "prefill_tok_s": n_prompt / prefill_s,
        "prefill_of_matmul": 2 * n_linear * n_prompt / prefill_s / limits["matmul_flops_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA device here (torch.cuda.is_available() is False).")
        return
    began = time.perf_counter()
    sys.path.insert(0, str(ROOT))
    from tests.kernels import triton_cases

    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(report["device"])
    triton_cases.main("cuda")
    wide = torch.cuda.get_device_capability()[0] >= 8
    dtype = "bf16" if wide else "fp16"
    report["ceilings"] = limits = ceilings(torch.bfloat16 if wide else torch.float16)
    print(
        f"copy {limits['copy_bytes_s'] / 1e9:.0f} GB/s, matmul {limits['matmul_flops_s'] / 1e12:.0f} TFLOP/s ({dtype})"
    )
    report["rows"] = rows = []
    has_room = torch.cuda.get_device_properties(0).total_memory > 20e9
    large = [("random:llama-2-7b", None), ("random:llama-2-7b", "int4")] if has_room else []
    for name, weights in [("smollm2-135m-instruct", None), ("smollm2-135m-instruct", "int4"), *large]:
        try:
            row = measure(name, weights, dtype, limits, n_new=64, n_prompt=2048)
        except (RuntimeError, ValueError) as error:
            row = {"model": name, "weights": weights or dtype, "error": str(error)[:500]}
        torch.cuda.empty_cache()
        rows.append(row)
        print(json.dumps(row))
    report["seconds"] = time.perf_counter() - began
    options.out.write_text(json.dumps(report, indent=1))
    print(f"done in {report['seconds']:.0f} s; written: {options.out}")


if __name__ == "__main__":
    main()
