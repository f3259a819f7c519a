"""Lesson 07, prefill against decode: your own dots on your own roofline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import log10
from statistics import median
from typing import Any

import plotly.graph_objects as go
import torch

from labkit import backends
from labkit.perf import hardware
from labkit.perf.cost import decode_cost, step_cost
from labkit.perf.forecast import peak_dtype
from labkit.perf.formats import bytes_a_weight
from labkit.perf.machine import Machine
from labkit.perf.probe import Bench, Engine, Point, engine_of
from labkit.ui import theme
from labkit.ui.controls import choice, slider
from labkit.ui.experiment import Experiment, Result
from labkit.ui.words import counted, say, sentences

N_REPEATS = 3
BATCH_CONTEXT_TOKENS = 64
MAX_BATCH = 64
"""So that the caches of all sequences stay below 200 MB."""
PROMPT, BATCH = "the prompt's length (prefill)", "the batch (decode, one token each)"
INTENSITIES = (0.1, 3000.0)


def ceilings(device: str = "auto", progress: Any = None) -> Machine:
    """This machine's two ceilings: measured once, then read back."""
    return hardware.machine(device, progress=progress)


def measure(lab: Any, job: Any, *, grows: str, up_to: int) -> Result:
    """Real steps of the real model, one dot each: FLOPs and bytes counted, seconds measured."""
    model = lab.model
    machine = ceilings(model.device.type, lambda share, what: job.progress(0.3 * share, what))
    engine = engine_here(model)
    used = {"dtype": engine.dtype, "backend": engine.backend, "bytes_a_weight": _bytes_a_weight(engine)}
    bench = Bench(model.config, engine, transformer=model.transformer)
    most = up_to if grows == PROMPT else min(up_to, MAX_BATCH)
    n_together = [n for n in (2**i for i in range(11)) if n <= most]
    dots: list[dict[str, Any]] = []
    with torch.inference_mode():
        for at, n in enumerate(n_together):
            point = Point("lesson", n) if grows == PROMPT else Point("lesson", 1, BATCH_CONTEXT_TOKENS, n)
            job.progress(0.3 + 0.7 * at / len(n_together), counted(n, "one token", "{n} tokens together"))
            seconds = []
            for _ in range(N_REPEATS + 1):  # the first warms up
                job.check()
                seconds.append(bench.sample(point)["step"])
            dots.append(dot(model.config, engine, machine, point, seconds[1:]))
            job.show(_result(machine, used, [*job.history, _series(grows, dots)]))
    result = _result(machine, used, [*job.history, _series(grows, dots)])
    result.raw = {"machine": json.loads(machine.to_json()), "used": used, "series": [_series(grows, dots)]}
    return result


def draw_recorded(raw: dict[str, Any]) -> Result:
    """The figure of dots that were recorded, under that machine's ceilings."""
    result = _result(Machine.from_json(json.dumps(raw["machine"])), raw["used"], raw["series"])
    result.figure.data[0].name = say("ceiling measured there")
    result.caption = say("Computed by {backend}; FLOPs and bytes counted", backend=raw["used"]["backend"])
    return result


def dot(config: Any, engine: Engine, machine: Machine, point: Point, seconds: list[float]) -> dict[str, Any]:
    """One measured step as a point of the roofline, with its shares of both ceilings."""
    cost = step_cost(
        config,
        n_new=point.n_new,
        n_past=point.n_past,
        n_sequences=point.n_sequences,
        dtype=engine.dtype,
        weights=engine.weights,
    ).total
    took, peak = median(seconds), machine.peak_flops(peak_dtype(machine, engine.dtype))
    return {
        "tokens together": point.n_rows,
        "FLOP/byte": cost.intensity,
        "GFLOP/s": cost.flops / took / 1e9,
        "ms": took * 1e3,
        "ms a token": took * 1e3 / point.n_rows,
        "MFU %": 100 * cost.flops / (took * peak),
        "MBU %": 100 * cost.bytes / (took * machine.read.value),
        "low": cost.flops / max(seconds) / 1e9,
        "high": cost.flops / min(seconds) / 1e9,
    }


def _series(grows: str, dots: list[dict[str, Any]]) -> dict[str, Any]:
    return {"grows": grows, "dots": list(dots)}


def _result(machine: Machine, used: dict[str, Any], series: list[dict[str, Any]]) -> Result:
    """``used``: the engine's dtype, its backend, and its bytes a weight."""
    dtype = peak_dtype(machine, used["dtype"])
    figure = roofline_figure(machine, dtype, highest=max(d["high"] for found in series for d in found["dots"]))
    for idx, found in enumerate(series):
        dots = found["dots"]
        look = theme.series(idx + 1)
        figure.add_scatter(
            x=[d["FLOP/byte"] for d in dots],
            y=[d["GFLOP/s"] for d in dots],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [d["high"] - d["GFLOP/s"] for d in dots],
                "arrayminus": [d["GFLOP/s"] - d["low"] for d in dots],
                "thickness": 1,
            },
            name=say("measured: prompt") if found["grows"] == PROMPT else say("measured: batch"),
            mode="lines+markers+text",
            text=[str(d["tokens together"]) for d in dots],
            textposition="bottom right",
            line={**look["line"], "width": 1},
            marker=look["marker"],
        )

    def mark(figure: Any, guess: float) -> None:
        if guess > 0:
            at = guess * 2 / used["bytes_a_weight"]
            _mark(figure, at, say("your guess"), color=theme.VERMILION, dash="dash", height=0.08)

    last = series[-1]["dots"]
    first, final = last[0], last[-1]
    climbed = say(
        "From **{first}** to **{last} tokens together** the same weights served {times:.0f} times the arithmetic a "
        "byte: MFU went from {mfu:.1f} % to {last_mfu:.0f} %, MBU from {mbu:.0f} % to {last_mbu:.0f} %.",
        first=first["tokens together"],
        last=final["tokens together"],
        times=final["FLOP/byte"] / first["FLOP/byte"],
        mfu=first["MFU %"],
        last_mfu=final["MFU %"],
        mbu=first["MBU %"],
        last_mbu=final["MBU %"],
    )
    ridge = say("The ridge lies at {ridge:.1f} FLOP a byte.", ridge=machine.ridge(dtype))
    rough = "The ceilings were measured while the machine was busy: take the shares as rough."
    summary = sentences(climbed, ridge, say(rough) if machine.busy else "")
    rows = [{k: v for k, v in d.items() if k not in ("low", "high")} for d in last]
    caption = say("Measured just now, computed by {backend}; FLOPs and bytes counted", backend=used["backend"])
    return Result(figure, rows, summary, caption, mark_guess=mark, data=series[-1])


def roofline_figure(machine: Machine, dtype: str, *, highest: float = 0.0) -> go.Figure:
    """The two ceilings on log-log axes, and the ridge where they meet. ``highest``: GFLOP/s that must be in view; a
    ceiling that was measured while the machine was busy may lie below what a step reaches later."""
    low, high = INTENSITIES
    ridge, peak = machine.ridge(dtype), machine.peak_flops(dtype) / 1e9
    xs = [low, ridge, high]
    figure = go.Figure(
        go.Scatter(
            x=xs,
            y=[machine.attainable_flops(x, dtype) / 1e9 for x in xs],
            name=say("ceiling measured here") if machine.measured else say("ceiling from the data sheet"),
            mode="lines",
            line={**theme.series(0)["line"], "width": 3},
        )
    )
    _mark(figure, ridge, say("ridge {at:.1f}", at=ridge), color=theme.NEUTRAL, dash="dot", height=0.02)
    theme.figure_layout(figure, x=say("FLOPs a byte (log)"), y=say("GFLOP/s in {dtype} (log)", dtype=dtype), height=430)
    figure.update_xaxes(type="log", range=[log10(low), log10(high)])
    figure.update_yaxes(type="log", range=[log10(peak) - 3, log10(max(peak, highest)) + 0.3])
    return figure


def _mark(figure: go.Figure, at: float, words: str, *, color: str, dash: str, height: float) -> None:
    """A vertical line with its words. On a log axis plotly takes an annotation's x as its logarithm."""
    figure.add_vline(x=at, line={"color": color, "dash": dash, "width": 1.5})
    figure.add_annotation(
        x=log10(at), y=height, yref="paper", text=words, showarrow=False, xanchor="left", yanchor="bottom", xshift=4
    )


def panel(lab: Any, guess: Any = None) -> Experiment:
    """Watch the dots climb the slope and meet the roof."""

    def run(job: Any, **values: Any) -> Result:
        return measure(lab, job, **values)

    fields = {
        "grows": choice("What grows", [PROMPT, BATCH], PROMPT, width="290px"),
        "up_to": slider("Up to, tokens together", 4, 512, 64, step=4),
    }
    question = "When does arithmetic begin to bind on this machine?"
    plain = getattr(lab, "load_options", {}).get("weights") == "plain"
    recorded = "roofline-plain" if plain else "roofline", draw_recorded
    return Experiment(question, run, fields, guess=guess, recorded=recorded)


def ceiling_rows(machine: Machine) -> list[dict[str, Any]]:
    """What was measured, with its spread, as a table."""
    rows = [
        ("read, all threads", machine.read, 1e9, "GB/s"),
        ("read, one thread", machine.read_one_thread, 1e9, "GB/s"),
        ("copy, all threads", machine.copy, 1e9, "GB/s"),
        *((say("matmul {dtype}", dtype=name), rate, 1e9, "GFLOP/s") for name, rate in machine.matmul.items()),
        ("one small operation", machine.dispatch_s, 1e-6, "µs"),
    ]
    return [
        {"ceiling": say(name), "figure": rate.value / by, "unit": unit, "spread %": 100 * rate.spread}
        for name, rate, by, unit in rows
        if rate is not None
    ]


def tokens_at_ridge(machine: Machine, model: Any) -> float:
    """How many tokens must share one reading of the weights before arithmetic binds: each gives a weight 2 FLOPs."""
    engine = engine_here(model)
    return machine.ridge(peak_dtype(machine, engine.dtype)) * _bytes_a_weight(engine) / 2


def speed_rows(machine: Machine, model: Any, trace: Any) -> list[dict[str, Any]]:
    """A run's speed below its ceiling: bandwidth over the bytes that each token must read."""
    engine, itl = engine_here(model), trace.itl_s
    middle = trace.n_prompt_tokens + trace.n_tokens // 2
    step = decode_cost(model.config, middle, dtype=engine.dtype, weights=engine.weights).total
    ceiling = machine.read.value / step.bytes
    rows: list[tuple[str, float, str]] = [
        ("your memory reads (measured)", machine.read.value / 1e9, "GB/s"),
        ("weights and cache, read for each token (counted)", step.bytes / 1e6, "MB"),
        ("your ceiling: one over the other", ceiling, "tok/s"),
    ]
    if itl:
        speed = len(itl) / sum(itl)
        rows += [
            ("your run (measured)", speed, "tok/s"),
            ("its share of the ceiling", 100 * speed / ceiling, "%"),
        ]
    return [{"what": say(what), "figure": figure, "unit": unit} for what, figure, unit in rows]


def batch_rows(model: Any, *, contexts: Sequence[int], batches: Sequence[int]) -> list[dict[str, Any]]:
    """FLOPs a byte of one decode step, counted: a row a context, and after it a column a batch."""
    engine = engine_here(model)
    return [
        {"context": n}
        | {
            say("batch {n}", n=b): decode_cost(
                model.config, n, n_sequences=b, dtype=engine.dtype, weights=engine.weights
            ).total.intensity
            for b in batches
        }
        for n in contexts
    ]


def engine_here(model: Any, *, kv_cache: Any = "contiguous", backend: str = "auto") -> Engine:
    """What the lab's runs go through here; plain PyTorch while the compiled step is not ready yet."""
    ready = backends.prepare(timeout_s=0) or model.device.type != "cpu"
    return engine_of(model, kv_cache=kv_cache, backend=backend if ready else "reference")


def _bytes_a_weight(engine: Engine) -> float:
    return bytes_a_weight(engine.weights, dtype=engine.dtype)
