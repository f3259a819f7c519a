"""What fewer bits cost by method: round to nearest, GPTQ and AWQ at 8, 4, 3 and 2 bits, in groups.

    python benchmarks/quantization.py [--runs rtn:4:64 gptq:3:32 ...] [--windows 4] [--length 512] [--json FILE]
    python benchmarks/quantization.py --table FILE          the markdown table of a finished run

Perplexity on the first half of Python's own manual; GPTQ and AWQ are calibrated on its second half. ``plain`` is
unpacked, ``stored`` the file's own blocks through the compiled step, which rounds activations to 16 bits. Beside it the
share of its power that the output of a layer's linears loses, on the calibration's activations, by kind of linear.
Each run is added to FILE at once, and a run that is there already is not repeated. A run takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import labkit
from labkit import backends, registry
from labkit.checkpoint import calibrate
from labkit.kvcache.contiguous import ContiguousCache
from labkit.perf.timer import NULL_TIMER
from labkit.quant import AWQ, GPTQ, RTN, Grid
from labkit.quant.gptq import output_error

RUNS = [
    f"{m}:{b}:{g}"
    for b, g in ((8, 64), (4, 64), (4, 32), (3, 64), (3, 32), (2, 64), (2, 32))
    for m in ("rtn", "gptq", "awq")
]
LEAST_LOST = 0.01
"""Where rounding costs less than this share, what a method recovers of it is noise."""
N_SKIPPED = 64
"""The first tokens of a window have too little before them to be judged by."""


def config_of(run: str, n_tokens: int) -> Any:
    """``method:bits:group`` as a config."""
    method, bits, group = run.split(":")
    if method == "rtn":
        return RTN(int(bits), int(group))
    return {"gptq": GPTQ, "awq": AWQ}[method](bits=int(bits), group_size=int(group), n_tokens=n_tokens)


def compiled_logits(model: Any, window: list[int]) -> torch.Tensor:
    """Logits (T, V) of a whole window through the compiled step."""
    entries = model.transformer.cache_entries
    cache = ContiguousCache(entries, capacity_tokens=len(window), dtype=model.dtype, device=model.device)
    backends.prepare("fused")
    name, step = backends.bind("fused", transformer=model.transformer, cache=cache)
    found = step(torch.tensor(window), rows="all", timer=NULL_TIMER, should_stop=lambda: False)
    assert step.computed_by == name, step.reason
    return found


@torch.inference_mode()
def perplexity(model: Any, windows: list[list[int]], logits_of: Any = lambda model, window: model(window)) -> float:
    """Of the next token, after each window's first ``N_SKIPPED``."""
    loss, n = 0.0, 0
    for window in windows:
        log_p = logits_of(model, window)[N_SKIPPED:-1].log_softmax(-1)
        loss -= log_p.gather(1, torch.tensor(window[N_SKIPPED + 1 :])[:, None]).sum().item()
        n += len(log_p)
    return math.exp(loss / n)


def measured(run: str, args: argparse.Namespace, windows: list[list[int]]) -> dict[str, Any]:
    """Load, quantise, measure."""
    row: dict[str, Any] = {"run": run, "calibration_tokens": 0, "seconds": 0.0, "windows": len(windows)}
    if run == "stored":
        model = labkit.load(dtype="fp32", weights="stored")
        return row | {"nbytes": model.nbytes, "perplexity": perplexity(model, windows, compiled_logits)}
    model = labkit.load(dtype="fp32", weights="plain", backend="reference")
    if run != "plain":
        config = config_of(run, args.tokens)
        component, config = registry.find("weights", config)
        errors: dict[str, list[float]] = defaultdict(list)
        on = Grid(config.bits, config.kind)
        began = time.perf_counter()
        if getattr(config, "calibrates", False):
            texts = calibrate.windows_of(model.tokenizer, config, model.config)

            def watch(idx: int, block: Any, linears: Any, sites: Any) -> None:
                for site in sites:
                    for name in site.names:
                        w = linears[name].weight
                        lost = output_error(w, on.nearest(w, config.group_size).dequantize(), site.hessian)
                        errors[f"{name} rtn"].append(lost)

            def walk(config: Any, transformer: Any) -> None:
                calibrate.walk(transformer, config, texts, watch=watch if args.errors else None)

            component.build(config, transformer=model.transformer, calibrate=walk)
            row["calibration_tokens"] = sum(map(len, texts))
        else:
            component.build(config, transformer=model.transformer)
        row |= {"seconds": time.perf_counter() - began, "errors": dict(errors)}
    return row | {"nbytes": model.nbytes, "perplexity": perplexity(model, windows)}


def table(rows: list[dict[str, Any]]) -> str:
    """A markdown table: a row a grid, a column a method."""
    exact = next(row["perplexity"] for row in rows if row["run"] == "plain")
    found: dict[tuple[int, int], dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        if ":" in row["run"]:
            method, bits, group = row["run"].split(":")
            found[int(bits), int(group)][method] = row
    lines = [
        "| bits | group | MB | RTN | GPTQ | AWQ | of RTN's loss, the better of the two recovers |",
        "|---|---|---|---|---|---|---|",
    ]
    for (bits, group), by in sorted(found.items(), reverse=True):
        cells = [
            f"{by[m]['perplexity']:.2f} ({by[m]['perplexity'] / exact - 1:+.1%})" if m in by else ""
            for m in ("rtn", "gptq", "awq")
        ]
        best = min((by[m]["perplexity"] for m in ("gptq", "awq") if m in by), default=math.nan)
        lost = by["rtn"]["perplexity"] - exact if "rtn" in by else 0.0
        back = (by["rtn"]["perplexity"] - best) / lost if lost > LEAST_LOST * exact else math.nan
        nbytes = mean(row["nbytes"] for row in by.values())
        recovered = "" if math.isnan(back) else f"{back:.0%}"
        lines.append(f"| {bits} | {group} | {nbytes / 1e6:.0f} | {' | '.join(cells)} | {recovered} |")
    own = next((f" The file's own blocks: {r['perplexity']:.2f}." for r in rows if r["run"] == "stored"), "")
    return f"Unpacked: {exact:.2f}.{own}\n\n" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--runs", nargs="+", default=["plain", "stored", *RUNS])
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192, help="of calibration text")
    parser.add_argument("--errors", action="store_true", help="also the output errors of round-to-nearest, by linear")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.table:
        print(table([json.loads(line) for line in args.table.read_text().splitlines()]))
        return
    done = (
        {json.loads(line)["run"] for line in args.json.read_text().splitlines()}
        if args.json and args.json.is_file()
        else set()
    )
    tokenizer = labkit.load(dtype="fp32", weights="stored", backend="reference").tokenizer
    ids = tokenizer.encode(calibrate.evaluation_text()[: 12 * args.windows * args.length])
    windows = [ids[i * args.length : (i + 1) * args.length] for i in range(args.windows)]
    for run in args.runs:
        if run in done:
            continue
        row = measured(run, args, windows)
        print(
            f"{run:12} {row['nbytes'] / 1e6:6.0f} MB  perplexity {row['perplexity']:8.3f}  {row['seconds']:.0f} s",
            flush=True,
        )
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
