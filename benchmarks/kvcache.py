"""KV caches: what they cost in time, bytes and quality. Every figure the lessons state about them comes from here.

    python benchmarks/kvcache.py [--only speedup attention step flat quality] [--rounds 7] [--json FILE]

Medians of rounds that interleave what is compared (A B C A B C ...). On the reference backend: only the cache changes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics
from statistics import median
from typing import Any

import torch

import labkit
from labkit import registry
from labkit.kvcache import Entry, Int4, Int8, LayerEntries, Paged, Sliding
from labkit.kvcache.quality import measure_quality
from labkit.perf.cost import decode_cost

SMOLLM2 = LayerEntries((Entry("k", (3, 64)), Entry("v", (3, 64))))
N_LAYERS, N_HEADS = 30, 9


def interleaved(work: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each piece of work, one list entry a round."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for name in work:
        work[name]()
    for _ in range(rounds):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def ratio(times: dict[str, list[float]], of: str, to: str) -> float:
    return median(a / b for a, b in zip(times[of], times[to], strict=True))


def build(choice: Any, layers: Any, capacity: int, dtype: torch.dtype) -> Any:
    component, config = registry.find("kv_cache", choice)
    return component.build(config, layers=layers, capacity_tokens=capacity, dtype=dtype)


def filled(choice: Any, layers: Any, n_tokens: int, dtype: torch.dtype, *, scatter: bool = False) -> Any:
    """A cache that holds n_tokens random ones; ``scatter`` shuffles which physical block holds which tokens."""
    cache = build(choice, layers, n_tokens + 64, dtype)
    if scatter:
        order = torch.randperm(cache.n_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        cache.allocator._free = type(cache.allocator._free)((block, None) for block in order)
    generator = torch.Generator().manual_seed(0)
    for start in range(0, n_tokens, 512):
        n = min(512, n_tokens - start)
        cache.begin(n)
        for idx, layer in enumerate(layers):
            k, v = (torch.randn(n, *entry.shape, generator=generator).to(dtype) for entry in layer.entries)
            cache.append(idx, k=k, v=v)
        cache.commit()
    return cache


def decode_attention(cache: Any, n_layers: int, dtype: torch.dtype) -> Callable[[], None]:
    """Append one token and attend, in every layer; then forget it again."""
    k, q = torch.randn(1, 3, 64).to(dtype), torch.randn(1, N_HEADS, 64).to(dtype)

    def run() -> None:
        n = cache.n_tokens()
        cache.begin(1)
        for layer_idx in range(n_layers):
            cache.append(layer_idx, k=k, v=k)
            cache.attend(layer_idx, q, scale=0.125)
        cache.commit()
        cache.truncate(n)

    return run


def attention(rounds: int) -> list[dict[str, Any]]:
    """Append and attention of one decode step in SmolLM2's shape, all 30 layers, by kind, dtype and context."""
    rows = []
    for dtype_name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for context in (256, 1024, 4096, 8000):
            layers = [SMOLLM2] * N_LAYERS
            caches = {
                "contiguous": filled("contiguous", layers, context, dtype),
                "paged": filled("paged", layers, context, dtype),
                "paged, scattered": filled("paged", layers, context, dtype, scatter=True),
                "paged 64": filled(Paged(block_size=64), layers, context, dtype),
                "int8": filled("int8", layers, context, dtype),
                "int4": filled("int4", layers, context, dtype),
                "sliding 1024": filled(Sliding(1024, 4), layers, context, dtype),
            }
            times = interleaved({n: decode_attention(c, N_LAYERS, dtype) for n, c in caches.items()}, rounds)
            for name, cache in caches.items():
                rows.append(
                    {
                        "dtype": dtype_name,
                        "context": context,
                        "kv_cache": name,
                        "ms": median(times[name]),
                        "of contiguous": ratio(times, name, "contiguous"),
                        "MB": cache.nbytes / 1e6,
                    }
                )
    return rows


def step(rounds: int) -> list[dict[str, Any]]:
    """A whole decode step of SmolLM2-135M at 4,096 tokens of context, by kind and dtype."""
    rows = []
    for dtype_name in ("fp32", "bf16"):
        model = labkit.load(dtype=dtype_name, backend="reference", weights="plain")
        layers = model.transformer.cache_entries
        kinds = {"contiguous": "contiguous", "paged": "paged", "int8": "int8", "int4": "int4"}
        caches = {name: filled(kind, layers, 4096, model.dtype) for name, kind in kinds.items()}

        def run(cache: Any, model: Any = model) -> Callable[[], None]:
            def one() -> None:
                n = cache.n_tokens()
                with torch.inference_mode():
                    model.transformer(torch.tensor([5]), cache, rows="last")
                cache.truncate(n)

            return one

        times = interleaved({name: run(cache) for name, cache in caches.items()}, rounds)
        for name in kinds:
            rows.append(
                {
                    "dtype": dtype_name,
                    "kv_cache": name,
                    "ms a token": median(times[name]),
                    "of contiguous": ratio(times, name, "contiguous"),
                    "MB": caches[name].nbytes / 1e6,
                }
            )
    return rows


def speedup(rounds: int) -> list[dict[str, Any]]:
    """With against without a cache. A step without one is a pass over the whole text: timed at nine lengths and summed
    over the lengths between (thousands of them would take hours). With one, steps are timed at the same lengths."""
    model = labkit.load(dtype="fp32", backend="reference", weights="plain")
    layers = model.transformer.cache_entries
    lengths = (8, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    without, cached = [], []
    ids = model.tokenizer.encode("\n".join(topics.topics.values())[:40_000])[:4096]
    cache = build("contiguous", layers, 4100, model.dtype)
    with torch.inference_mode():
        for length in lengths:
            cache.reset()
            model.transformer(torch.tensor(ids[: length - 1]), cache, rows="last")

            def recompute(length: int = length) -> None:
                none = build("none", layers, length, model.dtype)
                model.transformer(torch.tensor(ids[:length]), none, rows="last")

            def remember(length: int = length) -> None:
                model.transformer(torch.tensor(ids[length - 1 : length]), cache, rows="last")
                cache.truncate(length - 1)

            times = interleaved({"none": recompute, "contiguous": remember}, rounds if length < 300 else 1)
            without.append(median(times["none"]))
            cached.append(median(times["contiguous"]))

    def total(ms: list[float], first: int, last: int) -> float:
        return sum(_between(lengths, ms, length) for length in range(first, last))

    rows = []
    for n_prompt in (8, 256):
        for n_new in (8, 64, 128, 256, 512, 1000, 3840):
            prefill = _between(lengths, without, n_prompt)
            slow = prefill + total(without, n_prompt + 1, n_prompt + n_new)
            fast = prefill + total(cached, n_prompt + 1, n_prompt + n_new)
            work = [
                sum(decode_cost(model.config, n, kv_cache=kind).total.flops for n in range(n_prompt, n_prompt + n_new))
                for kind in ("none", "contiguous")
            ]
            rows.append(
                {
                    "prompt": n_prompt,
                    "new tokens": n_new,
                    "none s": slow / 1e3,
                    "contiguous s": fast / 1e3,
                    "measured x": slow / fast,
                    "FLOP ratio x": work[0] / work[1],
                    "last token alone x": _between(lengths, without, n_prompt + n_new - 1)
                    / _between(lengths, cached, n_prompt + n_new - 1),
                }
            )
    return rows


def _between(xs: tuple[int, ...], ys: list[float], x: int) -> float:
    for (x0, y0), (x1, y1) in zip(zip(xs, ys, strict=True), list(zip(xs, ys, strict=True))[1:], strict=False):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return ys[-1]


def flat(rounds: int) -> list[dict[str, Any]]:
    """One run of 1,000 new tokens: what a token costs outside attention must not depend on how many came before."""
    model = labkit.load(dtype="fp32", backend="reference", weights="plain")
    rows = []
    for kind in ("contiguous", "paged", "int8"):
        done = labkit.Pipeline(model, kv_cache=kind, backend="reference").generate(
            "Once upon a time", max_new_tokens=1000, ignore_eos=True
        )
        steps = [s for s in done.trace.steps if s.stage == "decode"]
        for name, part in (("tokens 50-250", steps[50:250]), ("tokens 750-950", steps[750:950])):
            rows.append(
                {
                    "kv_cache": kind,
                    "stretch": name,
                    "ms a token": median(1e3 * (s.end_s - s.start_s) for s in part),
                    "attention": median(1e3 * s.phases.get("attention", 0) for s in part),
                    "kv_cache ms": median(1e3 * s.phases.get("kv_cache", 0) for s in part),
                    "the rest": median(
                        1e3 * (s.end_s - s.start_s - s.phases.get("attention", 0) - s.phases.get("kv_cache", 0))
                        for s in part
                    ),
                }
            )
    return rows


def quality(rounds: int) -> list[dict[str, Any]]:
    """Perplexity and logits on the prose of Python's own manual, in windows of 1,024 tokens and in one of 4,096."""
    model = labkit.load(dtype="fp32", backend="reference", weights="plain")
    ids = model.tokenizer.encode("\n".join(topics.topics.values())[:120_000])
    choices = {
        "int8": Int8(),
        "int8, nothing recent in full": Int8(recent=0),
        "int4, recent 128": Int4(),
        "int4, recent 32": Int4(recent=32),
        "int4, nothing recent in full": Int4(recent=0),
        "int4, group 64": Int4(group=64, recent=32),
        "sliding 512, 4 sinks": Sliding(512, 4),
        "sliding 512, no sinks": Sliding(512, 0),
    }
    rows = []
    for length, n_windows in ((1024, 3), (4096, 1)):
        texts = [ids[i * length : (i + 1) * length] for i in range(n_windows)]
        found = measure_quality(model, texts, list(choices.values()), n_skipped=256)
        for name, q in zip(choices, found, strict=True):
            rows.append(
                {
                    "window": length,
                    "kv_cache": name,
                    "perplexity": q.perplexity,
                    "lossless": q.lossless_perplexity,
                    "change %": 100 * q.perplexity_change,
                    "logit error": q.logit_error,
                    "KL nats": q.kl_divergence,
                    "same token %": 100 * q.same_token,
                    "MB": q.nbytes / 1e6,
                    "tokens": q.n_tokens,
                }
            )
    return rows


PARTS = {part.__name__: part for part in (speedup, attention, step, flat, quality)}


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    cells = [list(rows[0])] + [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    results = {}
    for name in args.only:
        results[name] = PARTS[name](args.rounds)
        show((PARTS[name].__doc__ or name).splitlines()[0], results[name])
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
