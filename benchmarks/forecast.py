"""How good is the forecast? Predict, then run: prompt lengths, contexts, dtypes, weights, caches and backends.

    python benchmarks/forecast.py                 # 29 combinations, 5 to 15 minutes on an idle machine
    python benchmarks/forecast.py --only fused    # those whose engine's name contains a word
    python benchmarks/forecast.py --json out.json

Each engine's rates are measured on stand-in models first (never on the model that is forecast), then its runs follow
at once, each repeated. Nothing is fitted to the runs. When others use the machine, a run is repeated and the calmest
repeats count; how busy it was stands in the table, because a storm that comes between the two is not the forecast's.
"""

from __future__ import annotations

import argparse
import gc
import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

import labkit
from labkit import backends
from labkit.perf import hardware, rates
from labkit.perf.busy import BusyWatch
from labkit.perf.forecast import Forecast, forecast
from labkit.perf.probe import Engine
from labkit.perf.trace import Trace, quantile

MODEL = "smollm2-135m-instruct"
TARGET = 0.15
CALM = 0.08
"""A repeat during which others used less of the cores than this counts as undisturbed."""

SHORT, LONG = (32, 256, 900), (32, 256, 900, 2000)
CASES: list[tuple[Engine, tuple[int, ...], int]] = [
    (Engine("reference"), LONG, 12),
    (Engine("fused"), LONG, 24),
    (Engine("fused", weights="int8"), LONG, 24),
    (Engine("fused", weights="int4"), LONG, 24),
    (Engine("reference", weights="int8"), SHORT, 12),
    (Engine("fused", dtype="bf16"), (32, 256), 24),
    (Engine("reference", kv_cache="none"), (32, 128, 384), 5),
    (Engine("reference", kv_cache="paged"), SHORT, 12),
    (Engine("reference", kv_cache="int8"), (256, 900), 12),
]
"""Engine, prompt lengths, new tokens."""


@dataclass
class Row:
    """One combination: what was said, what came, and the phases of both."""

    engine: str
    n_prompt: int
    forecast: Forecast
    ttft_s: float
    itl_s: float
    busy: float
    calm: bool
    traces: list[Trace] = field(default_factory=list)

    @property
    def ttft_error(self) -> float:
        return self.forecast.ttft.value / self.ttft_s - 1

    @property
    def itl_error(self) -> float:
        return self.forecast.itl.value / self.itl_s - 1

    def residual_s(self, stage: str) -> dict[str, float]:
        """Measured minus forecast, by phase: of the prefill, or of one decode step."""
        predicted = getattr(self.forecast, stage).phases
        n = len(self.traces) * (1 if stage == "prefill" else self.traces[0].n_tokens - 1)
        names = {name for trace in self.traces for name in trace.stage_phases(stage)} | set(predicted)
        return {
            name: sum(trace.stage_phases(stage).get(name, 0.0) for trace in self.traces) / n
            - (predicted[name].forecast_s if name in predicted else 0.0)
            for name in names
        }


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    machine = hardware.measure("cpu", progress=_say)
    print(machine.describe(), "\n")
    rows: list[Row] = []
    for engine, lengths, n_new in CASES:
        if options.only and options.only not in engine.label():
            continue
        try:
            rows += _engine_rows(engine, lengths, n_new, options)
        except (ValueError, RuntimeError) as error:
            print(f"{engine.label():44} left out: {error}", flush=True)
    if not rows:
        raise SystemExit(f"no engine's name contains {options.only!r}.")
    report(rows)
    if options.json:
        Path(options.json).write_text(json.dumps(_as_json(machine, rows), indent=1), encoding="utf-8")


def _engine_rows(engine: Engine, lengths: tuple[int, ...], n_new: int, options: Any) -> list[Row]:
    model = labkit.load(MODEL, device="cpu", dtype=engine.dtype, weights=engine.weights or "plain")
    pipeline = labkit.Pipeline(model, kv_cache=engine.kv_cache, backend=engine.backend)
    backends.prepare(engine.backend)
    pipeline.generate("Once", max_new_tokens=2)
    found = rates.measure(model.config, engine, progress=_say)
    machine = hardware.measure("cpu", progress=_say)
    rows = []
    for n_prompt in lengths:
        traces, busy = _calmest(pipeline, n_prompt, n_new, options)
        said = forecast(
            model.config,
            engine,
            n_prompt_tokens=traces[0].n_prompt_tokens,
            n_new_tokens=traces[0].n_tokens,
            machine=machine,
            rates=found,
        )
        ttft = median(trace.ttft_s or 0.0 for trace in traces)
        itl = median(gap for trace in traces for gap in trace.itl_s)
        row = Row(engine.label(), n_prompt, said, ttft, itl, max(busy, found.busy_share), busy < CALM, traces)
        rows.append(row)
        _print_row(row)
    del pipeline, model
    gc.collect()
    return rows


def _calmest(pipeline: Any, n_prompt: int, n_new: int, options: Any) -> tuple[list[Trace], float]:
    """``--repeats`` runs, more when the machine is busy: the calmest of them, and how busy those were."""
    prompt = "The" + " the" * (n_prompt - 1)
    runs: list[tuple[float, Trace]] = []
    for attempt in range(options.repeats + options.patience):
        with BusyWatch() as watch:
            trace = pipeline.generate(prompt, max_new_tokens=n_new, ignore_eos=True).trace
        runs.append((watch.share, trace))
        calm = [share for share, _ in runs if share < CALM]
        if attempt + 1 >= options.repeats and len(calm) >= min(2, options.repeats):
            break
    best = sorted(runs, key=lambda run: run[0])[: options.repeats]
    return [trace for _, trace in best], median(share for share, _ in best)


def _print_row(row: Row) -> None:
    print(
        f"{row.engine:44} {row.n_prompt:5} | TTFT {row.forecast.ttft.value * 1e3:8.1f} -> {row.ttft_s * 1e3:8.1f} ms "
        f"{row.ttft_error:+6.0%} | ITL {row.forecast.itl.value * 1e3:7.2f} -> {row.itl_s * 1e3:7.2f} ms "
        f"{row.itl_error:+6.0%} | busy {row.busy:.0%}",
        flush=True,
    )


def report(rows: list[Row]) -> None:
    """The figures that the README may state, the worst cases, and where what is left comes from."""
    print(f"\n{len(rows)} combinations, {sum(row.calm for row in rows)} of them on a calm machine.")
    for name, attribute, inside in (
        ("TTFT", "ttft_error", lambda r: r.ttft_s in r.forecast.ttft),
        ("ITL", "itl_error", lambda r: r.itl_s in r.forecast.itl),
    ):
        errors = [abs(getattr(row, attribute)) for row in rows]
        print(
            f"{name}: median error {median(errors):.1%} (target {TARGET:.0%}), 90th percentile "
            f"{quantile(errors, 0.9):.0%}, worst {max(errors):.0%}; "
            f"inside its interval: {sum(map(inside, rows))} of {len(rows)}"
        )
    print("\nThe worst, and the phase that most of the difference lies in (measured minus forecast):")
    worst = sorted(rows, key=lambda r: -max(abs(r.ttft_error), abs(r.itl_error)))[:6]
    for row in worst:
        stage = "prefill" if abs(row.ttft_error) > abs(row.itl_error) else "decode"
        residual = row.residual_s(stage)
        name = max(residual, key=lambda phase: abs(residual[phase]))
        error = row.ttft_error if stage == "prefill" else row.itl_error
        print(f"  {row.engine} {row.n_prompt}: {stage} {error:+.0%}, {name} {residual[name] * 1e3:+.2f} ms")
    print("\nWhat is left, attributed: mean of |measured - forecast| as a share of the stage, by phase")
    for stage in ("prefill", "decode"):
        print(f"  {stage}: " + ", ".join(f"{name} {share:.1%}" for name, share in attribution(rows, stage)))


def attribution(rows: list[Row], stage: str) -> list[tuple[str, float]]:
    """Phase -> its mean share of the stage's time that the forecast missed, the largest first."""
    shares: dict[str, list[float]] = {}
    for row in rows:
        took = row.ttft_s if stage == "prefill" else row.itl_s
        for name, seconds in row.residual_s(stage).items():
            shares.setdefault(name, []).append(abs(seconds) / took)
    means = {name: sum(values) / len(rows) for name, values in shares.items()}
    return sorted(means.items(), key=lambda item: -item[1])[:6]


def _as_json(machine: Any, rows: list[Row]) -> dict[str, Any]:
    return {
        "machine": json.loads(machine.to_json()),
        "rows": [
            {
                "engine": row.engine,
                "n_prompt_tokens": row.n_prompt,
                "ttft_forecast_s": row.forecast.ttft.value,
                "ttft_s": row.ttft_s,
                "itl_forecast_s": row.forecast.itl.value,
                "itl_s": row.itl_s,
                "busy_share": row.busy,
            }
            for row in rows
        ],
    }


def _say(share: float, what: str) -> None:
    pass


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="engines whose name contains this, e.g. fused or int8")
    parser.add_argument("--repeats", type=int, default=3, help="runs that count for each combination")
    parser.add_argument("--patience", type=int, default=4, help="further runs when the machine is busy")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own number")
    parser.add_argument("--json", default="", help="write the rows there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
