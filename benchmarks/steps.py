"""What a step of several tokens costs beside one of a single token: the check of a draft, and a batch of sequences.

    python benchmarks/steps.py                                        about two minutes
    python benchmarks/steps.py --weights int4 --kv-cache paged --json steps.json

Rows of weights are read once for all tokens of a step, so a few tokens should cost little more than one. Each figure is
the median over rounds of one step's time over a single token's beside it; the processor's caches hold what the last
step left, as in a run. ``--json`` writes {"ratio_to_one": {weights: {"tokens": {n: ratio}, "sequences": {n: ratio}}}}.
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
from labkit import backends, registry
from labkit.perf.timer import NULL_TIMER

COUNTS = (2, 4, 8, 16)
WEIGHTS = ("int4", "int8", "bf16")
N_PAST = 256
OPTIONS = {"timer": NULL_TIMER, "should_stop": lambda: False}


class Bench:
    """One model on one cache that holds the same past for each sequence."""

    def __init__(self, name: str, kind: str, n_past: int) -> None:
        self.model = labkit.load(dtype=name if name in ("fp32", "bf16") else "auto", weights=_packed(name))
        self.n_past = n_past
        component, config = registry.find("kv_cache", kind)
        self.cache = component.build(
            config, layers=self.model.transformer.cache_entries, capacity_tokens=n_past + max(COUNTS),
            n_sequences=max(COUNTS), device=self.model.device, dtype=self.model.dtype,
        )  # fmt: skip
        backends.prepare("fused")
        _, self.step = backends.bind("fused", transformer=self.model.transformer, cache=self.cache)

    def fill(self) -> None:
        """Give each sequence its past."""
        prompt = torch.arange(self.n_past) % 1000
        for sequence_id in range(max(COUNTS)):
            self.step(prompt, counts={sequence_id: self.n_past}, **OPTIONS)

    def seconds(self, counts: dict[int, int]) -> float:
        """One step of so many tokens of each sequence, which are then forgotten."""
        n = sum(counts.values())
        ids = torch.arange(n) % 1000
        began = time.perf_counter()
        self.step(ids, counts=None if list(counts) == [0] else counts, rows="all", **OPTIONS)
        took = time.perf_counter() - began
        for sequence_id in counts:
            self.cache.truncate(self.n_past, sequence_id)
        return took


def _packed(name: str) -> str:
    return "plain" if name in ("fp32", "bf16") else name


def measure(name: str, kind: str, rounds: int) -> tuple[float, dict[str, dict[str, float]]]:
    """Milliseconds of one token, and the ratios."""
    bench = Bench(name, kind, N_PAST)
    with torch.inference_mode():
        bench.fill()
        ways = {("tokens", n): {0: n} for n in COUNTS} | {("sequences", n): dict.fromkeys(range(n), 1) for n in COUNTS}
        ones, ratios = [], {way: [] for way in ways}
        for _ in range(rounds):
            for way, counts in ways.items():
                ones.append(bench.seconds({0: 1}))
                ratios[way].append(bench.seconds(counts) / ones[-1])
    if bench.step.computed_by != "fused":
        raise RuntimeError(f"the compiled step did not serve: {bench.step.reason}")
    found: dict[str, dict[str, float]] = {"tokens": {}, "sequences": {}}
    for (kind_of, n), values in ratios.items():
        found[kind_of][str(n)] = round(median(values), 3)
    return 1e3 * median(ones), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--weights", nargs="+", default=list(WEIGHTS), choices=["stored", "int4", "int8", "w8a8", "bf16", "fp32"]
    )
    parser.add_argument("--kv-cache", default="contiguous")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ratios: dict[str, Any] = {}
    print(f"{torch.get_num_threads()} threads, {args.kv_cache} cache, after {N_PAST} tokens; time over one token's")
    for name in args.weights:
        one, ratios[name] = measure(name, args.kv_cache, args.rounds)
        print(f"  {name}: one token {one:.1f} ms")
        for kind, found in ratios[name].items():
            print(f"    {kind:10s} " + "   ".join(f"{n}: {ratio:.2f}" for n, ratio in found.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"ratio_to_one": ratios}, indent=1))


if __name__ == "__main__":
    main()
