"""Matrix-vector products and matrix products of each weight form, beside this machine's measured read bandwidth.

    python benchmarks/kernels.py

For each form: weights a second, bytes a second, and the share of the bandwidth; torch's own packed products beside
labkit's. Interleaved, medians and best. The weights of all layers are read in turn, so that no cache holds them.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from labkit import backends
from labkit.kernels.cpu import cells, linear, machine_code, memory, plan, team
from labkit.quant import W8A8, Int4, Int8, StoredLinear, blocks

SHAPES = ((49_152, 576), (1_536, 576), (576, 1_536))
BYTES = 160e6
"""Weights laid out for one form: several times any cache."""


def read_bandwidth(n_threads: int) -> Callable[[], float]:
    """A function that sums an array once and returns bytes a second."""
    torch.set_num_threads(n_threads)
    array = torch.ones(int(BYTES) // 4)

    def once() -> float:
        began = time.perf_counter()
        array.sum()
        return array.nbytes / (time.perf_counter() - began)

    return once


def multiplier(modules: list[nn.Module], n_tokens: int, n_threads: int) -> Callable[[], float]:
    """labkit's compiled product over all of ``modules``; returns weights a second."""
    squad, address = team.team(n_threads), machine_code.address("matmul")
    first = np.asarray(plan.describe(modules[0]), np.int64)
    n_out, n_in = int(first[plan.N_OUT]), int(first[plan.N_IN])
    x, out = torch.randn(n_tokens, n_in + -n_in % 64), torch.empty(n_tokens, n_out + -n_out % 4)
    work = torch.empty(memory.product_bytes(n_tokens, n_in, n_threads), dtype=torch.uint8)
    jobs: list[np.ndarray] = []
    kept: list[object] = [x, out, work]  # a job holds addresses only
    for module in modules:
        row = np.asarray(plan.describe(module), np.int64)
        job = np.zeros(cells.N_CELLS, np.int64)
        job[cells.FUNCTION], job[cells.LINEAR_AT] = address, row.ctypes.data
        job[[cells.INPUT, cells.INPUT_STRIDE, cells.OUTPUT, cells.OUTPUT_STRIDE]] = (
            x.data_ptr(), 4 * x.stride(0), out.data_ptr(), 4 * out.stride(0),
        )  # fmt: skip
        job[[cells.N_INPUTS, cells.SCRATCH]] = n_tokens, (work.data_ptr() + 63) // 64 * 64
        jobs.append(job)
        kept.append((module, row))

    def once() -> float:
        began = time.perf_counter()
        for job in jobs:
            squad.run(job)
        return n_out * n_in * len(jobs) * bool(kept) / (time.perf_counter() - began)

    return once


def torch_product(weights: list[torch.Tensor], n_tokens: int) -> Callable[[], float]:
    """torch's ``linear`` over all of ``weights``; returns weights a second."""
    x = torch.randn(n_tokens, weights[0].shape[1]).to(weights[0].dtype)

    def once() -> float:
        began = time.perf_counter()
        for weight in weights:
            F.linear(x, weight)
        return weights[0].numel() * len(weights) / (time.perf_counter() - began)

    return once


def contenders(n_out: int, n_in: int, n_tokens: int, n_threads: int) -> dict[str, tuple[float, Callable[[], float]]]:
    """Form -> (bytes a weight, what measures it once)."""
    copies = max(1, int(BYTES / (n_out * n_in)))
    plain = nn.Linear(n_in, n_out, bias=False).requires_grad_(False)
    found: dict[str, tuple[float, Callable[[], float]]] = {}

    def many(make: Callable[[], nn.Module], part: int = 1) -> list[nn.Module]:
        return [make() for _ in range(max(1, copies // part))]

    found["labkit fp32"] = 4.0, multiplier(many(lambda: copy.deepcopy(plain), 4), n_tokens, n_threads)
    halves = many(lambda: copy.deepcopy(plain).to(torch.bfloat16), 4)
    found["labkit bf16"] = 2.0, multiplier(halves, n_tokens, n_threads)
    found["labkit int8"] = 1.0, multiplier(many(lambda: Int8().layer("", plain)), n_tokens, n_threads)
    found["labkit w8a8"] = 1.0, multiplier(many(lambda: W8A8().layer("", plain)), n_tokens, n_threads)
    for config in (Int4(64), Int4(32), Int4(64, symmetric=True)):
        bytes_a_weight = 0.5 + (2 if config.symmetric else 3) / config.group_size
        grid = f"g{config.group_size}{' symmetric' if config.symmetric else ''}"
        make = many(lambda config=config: config.layer("", plain))
        found[f"labkit int4 {grid}"] = bytes_a_weight, multiplier(make, n_tokens, n_threads)
    stored = blocks.anything("Q4_1", n_out, n_in)
    made = many(lambda: StoredLinear("Q4_1", stored.clone(), n_in))
    found["labkit Q4_1"] = 0.625, multiplier(made, n_tokens, n_threads)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        weights = [plain.weight.to(dtype).clone() for _ in range(max(1, copies // 4))]
        found[f"torch {name}"] = float(dtype.itemsize), torch_product(weights, n_tokens)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 2, 4, 8, 16, 256])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    options = parser.parse_args()
    backends.prepare("fused")
    linear.active()
    bandwidth, rows = read_bandwidth(options.threads), []
    print("| shape | tokens | form | G weights/s | GB/s | of the bandwidth | GFLOP/s |\n|---|---|---|---|---|---|---|")
    for n_out, n_in in SHAPES:
        for n_tokens in options.tokens:
            forms = contenders(n_out, n_in, n_tokens, options.threads)
            rates: dict[str, list[float]] = {name: [] for name in forms}
            reads = []
            for _ in range(options.rounds if n_tokens < 100 else 3):
                reads.append(bandwidth())
                for name, (_, once) in forms.items():
                    rates[name].append(once())
            limit = median(reads)
            for name, (bytes_a_weight, _) in forms.items():
                rate = median(rates[name])
                rows.append(
                    {"n_out": n_out, "n_in": n_in, "tokens": n_tokens, "form": name, "weights_s": rate,
                     "bytes_s": rate * bytes_a_weight, "bandwidth": limit, "flops_s": 2 * rate * n_tokens}
                )  # fmt: skip
                share = rate * bytes_a_weight / limit
                speed = f"{rate / 1e9:.1f} | {rate * bytes_a_weight / 1e9:.1f} | {share:.0%}"
                print(f"| {n_out} x {n_in} | {n_tokens} | {name} | {speed} | {2 * rate * n_tokens / 1e9:.0f} |")
    options.out.write_text(json.dumps({"threads": options.threads, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
