"""Who computes a step, on which cache, for how many sequences, after how many tokens: milliseconds, side by side.

    python benchmarks/backends.py                         all of it (about six minutes)
    python benchmarks/backends.py --only caches context   some of it

    backends   one token after 256, each backend that can serve each form of weights
    caches     one token after 256 and after 1,024, each kind of cache, the compiled step beside plain PyTorch
    batches    one token for each of 1 to 16 sequences
    context    one token after 256 to 8,000: all of it, attention, and the rest
    bandwidth  bytes of the weights a token reads over its time, as a share of what this machine reads

Contenders take turns step by step in one process; medians (quartiles). Pasts are filled with random numbers: what is
stored costs the same whatever it says.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import torch

import labkit
from labkit import backends, registry
from labkit.backends import compiled
from labkit.perf.timer import Timer

FORMS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32", "weights": "plain"},
    "bf16": {"dtype": "bf16", "weights": "plain"},
    "stored": {"weights": "stored"},
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
}
KINDS = ("contiguous", "paged", "int8", "int4", "sliding")
_models: dict[str, labkit.Model] = {}


def model_of(form: str) -> labkit.Model:
    if form not in _models:
        _models[form] = labkit.load(**FORMS[form])
    return _models[form]


class Contender:
    """One backend on one cache, whose sequences hold ``n_past`` tokens each before every step."""

    def __init__(self, model: labkit.Model, backend: str, kind: str, n_past: int, n_sequences: int = 1) -> None:
        self.model, self.n_past, self.n_sequences = model, n_past, n_sequences
        component, config = registry.find("kv_cache", kind)
        self.cache = component.build(
            config, layers=model.transformer.cache_entries, capacity_tokens=n_past + 40, n_sequences=n_sequences,
            device=model.device, dtype=model.dtype,
        )  # fmt: skip
        self._fill()
        backends.prepare(backend)
        if backend == "compiled" and compiled.reason_for(model.transformer) is None:
            compiled.pieces_of(model.transformer).ready(None)
        _, self.step = backends.bind(backend, transformer=model.transformer, cache=self.cache)
        self.serves = self.step.computed_by == backend
        self.seconds: list[float] = []
        self.phases: list[dict[str, float]] = []

    def _fill(self) -> None:
        counts = dict.fromkeys(range(self.n_sequences), self.n_past)
        self.cache.open(counts)
        n = self.n_past * self.n_sequences
        for idx, layer in enumerate(self.cache.layers):
            entries = {e.name: torch.randn(n, *e.shape, dtype=self.model.dtype) for e in layer.entries}
            self.cache.append(idx, **entries)
        self.cache.commit()

    def once(self, *, keep: bool) -> None:
        counts = None if self.n_sequences == 1 else dict.fromkeys(range(self.n_sequences), 1)
        ids, timer = torch.arange(self.n_sequences) + 100, Timer(detail_every=0)
        timer.begin()
        timer.begin_step("decode")
        began = time.perf_counter()
        self.step(ids, counts=counts, timer=timer, should_stop=lambda: False)
        took = time.perf_counter() - began
        timer.end_step()
        if keep:
            self.seconds.append(took)
            self.phases.append(timer.records()[0].phases)


def race(contenders: dict[str, Contender], rounds: int) -> None:
    """Blocks of three steps in turn, the first of each block not counted: it finds the others' data in the caches."""
    with torch.inference_mode():
        for round_idx in range(rounds + 1):
            for contender in contenders.values():
                for i in range(4):
                    contender.once(keep=round_idx > 0 and i > 0)
                for sequence_id in range(contender.n_sequences):
                    contender.cache.truncate(contender.n_past, sequence_id)


def ms(contender: Contender) -> str:
    low, _, high = quantiles(contender.seconds, n=4)
    return f"{median(contender.seconds) * 1e3:.1f} ({low * 1e3:.1f}-{high * 1e3:.1f})"


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def measure_backends(rounds: int) -> None:
    names = [info.name for info in registry.components("backend") if not info.unavailable]
    rows = []
    for form in FORMS:
        made = {name: Contender(model_of(form), name, "contiguous", 256) for name in names}
        served = {name: c for name, c in made.items() if c.serves}
        race(served, rounds)
        rows.append([form, *(ms(served[name]) if name in served else "-" for name in names)])
    show("One token after 256, ms, by backend", ["weights", *names], rows)


def measure_caches(rounds: int) -> None:
    rows, model = [], model_of("int8")
    for n_past in (256, 1024):
        fused = {kind: Contender(model, "fused", kind, n_past) for kind in KINDS}
        race(fused, rounds)
        plain = {kind: Contender(model_of("bf16"), "reference", kind, n_past) for kind in KINDS}
        race(plain, max(2, rounds // 3))
        rows += [[str(n_past), kind, ms(fused[kind]), ms(plain[kind])] for kind in KINDS]
    show("One token by cache, ms", ["after", "cache", "fused, int8 weights", "plain PyTorch, bf16"], rows)


def measure_batches(rounds: int) -> None:
    rows = []
    for n in (1, 2, 4, 8, 16):
        row = [str(n)]
        for form in ("bf16", "int8"):
            made = {name: Contender(model_of(form), name, "contiguous", 256, n) for name in ("fused", "reference")}
            race(made, rounds if form == "bf16" else max(2, rounds // 3))
            row += [f"{n / median(c.seconds):.0f}" for c in made.values()]
        rows.append(row)
    columns = ["sequences", "bf16 fused", "bf16 plain PyTorch", "int8 fused", "int8 plain PyTorch"]
    show("Tokens/s, one for each sequence after 256", columns, rows)


def measure_context(rounds: int) -> None:
    rows, model = [], model_of("int8")
    made = {n: Contender(model, "fused", "contiguous", n) for n in (256, 1024, 2048, 4096, 8000)}
    race({str(n): c for n, c in made.items()}, rounds)
    for n, c in made.items():
        attention = [phases["attention"] * 1e3 for phases in c.phases]
        rest = [s * 1e3 - a for s, a in zip(c.seconds, attention, strict=True)]
        rows.append([str(n), ms(c), f"{median(attention):.1f}", f"{median(rest):.1f}"])
    show("One token, int8 weights, ms", ["after", "all", "attention", "the rest"], rows)


def measure_bandwidth(rounds: int) -> None:
    big = torch.zeros(64 * 2**20)  # 256 MiB
    reads, rows = [], []
    made = {form: Contender(model_of(form), "fused", "contiguous", 16) for form in FORMS}
    for _ in range(3):
        for _ in range(5):
            began = time.perf_counter()
            big.sum()
            reads.append(big.nbytes / (time.perf_counter() - began))
        race(made, max(2, rounds // 3))
    read = median(reads)
    for form, c in made.items():
        model = c.model
        rate = model.nbytes / median(c.seconds)
        rows.append([form, f"{model.nbytes / 1e6:.0f}", ms(c), f"{rate / 1e9:.1f}", f"{rate / read:.0%}"])
    title = f"Weights read a token; this machine reads {read / 1e9:.1f} GB/s (a sum over 256 MiB, same run)"
    show(title, ["weights", "MB", "ms a token after 16", "GB/s", "share"], rows)


PARTS: dict[str, Callable[[int], None]] = {
    "backends": measure_backends,
    "caches": measure_caches,
    "batches": measure_batches,
    "context": measure_context,
    "bandwidth": measure_bandwidth,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(f"SmolLM2-135M, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name in options.only:
        PARTS[name](options.rounds)


if __name__ == "__main__":
    main()
