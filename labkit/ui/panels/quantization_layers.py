"""Lesson 09, inside the layers: where rounding loses how much, and what GPTQ and AWQ make of one layer."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from labkit.checkpoint import calibrate
from labkit.kvcache.none import NoCache
from labkit.quant import Grid, awq, gptq
from labkit.quant.format import linears_of
from labkit.ui import theme
from labkit.ui.controls import choice, slider
from labkit.ui.experiment import Experiment, Result
from labkit.ui.panels.quantization import held_out

KINDS = {
    "attention.q_proj": "q", "attention.k_proj": "k", "attention.v_proj": "v", "attention.o_proj": "o",
    "ffn.gate_proj": "gate", "ffn.up_proj": "up", "ffn.down_proj": "down",
}  # fmt: skip


# --- where the error goes


def layer_inputs(lab: Any, ids: list[int], upto: int, visit: Any) -> None:
    """Send ``ids`` through the first ``upto`` layers; ``visit(idx, block, {linear: its input})`` at each."""
    transformer = lab.model.transformer
    with torch.no_grad():
        step = transformer.open(NoCache(transformer.cache_entries, capacity_tokens=len(ids)), len(ids))
        x = transformer.embed(torch.tensor(ids), step)
        for idx in range(upto):
            block = transformer.layers[idx]
            seen: dict[str, torch.Tensor] = {}
            hooks = [linear.register_forward_pre_hook(_keeper(seen, name)) for name, linear in linears_of(block)]
            try:
                x = block(x, step, idx)
            finally:
                for hook in hooks:
                    hook.remove()
            visit(idx, block, seen)


def _keeper(seen: dict[str, torch.Tensor], name: str) -> Any:
    def keep(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        seen[name] = args[0].float()

    return keep


def map_errors(lab: Any, job: Any, *, bits: int, group_size: int) -> Result:
    """The share of its power that each linear's output loses to rounding, layer by layer, on real text."""
    n_layers, grid = lab.model.config.n_layers, Grid(bits)
    lost: dict[str, list[float]] = {name: [] for name in KINDS.values()}

    def visit(idx: int, block: Any, seen: dict[str, torch.Tensor]) -> None:
        job.progress(idx / n_layers, f"layer {idx + 1} of {n_layers}")
        for name, linear in linears_of(block):
            if name in KINDS:
                w = linear.weight.float()
                x = seen[name][::3]
                off = x @ (grid.nearest(w, group_size).dequantize() - w).T
                lost[KINDS[name]].append(float(off.square().sum() / (x @ w.T).square().sum()))

    layer_inputs(lab, held_out(lab, 192), n_layers, visit)
    values = [[100 * v for v in lost[name]] for name in lost]
    figure = go.Figure(
        go.Heatmap(
            z=values,
            y=list(lost),
            x=list(range(n_layers)),
            colorscale="Cividis",
            colorbar={"title": "% lost"},
            hovertemplate="layer %{x}, %{y}: %{z:.2f} %<extra></extra>",
        )
    )
    theme.figure_layout(figure, x="layer", y="")
    figure.update_layout(height=320)
    figure.update_yaxes(autorange="reversed")
    rows = [
        {"linear": name, "mean, %": 100 * sum(v) / len(v), "worst, %": 100 * max(v), "in layer": v.index(max(v))}
        for name, v in lost.items()
    ]
    worst, best = max(rows, key=lambda r: r["mean, %"]), min(rows, key=lambda r: r["mean, %"])
    summary = (
        f"At {bits} bits in groups of {group_size}, **{worst['linear']}** loses most of its output's power on average "
        f"({worst['mean, %']:.2g} %), **{best['linear']}** least ({best['mean, %']:.2g} %)."
    )
    return Result(figure, rows, summary, "Share of the output's power that rounding loses", data=lost)


def map_panel(lab: Any) -> Experiment:
    def run(job: Any, **values: Any) -> Result:
        return map_errors(lab, job, **values)

    fields = {"bits": choice("Bits", [2, 3, 4, 8], 4), "group_size": choice("Weights in a group", [32, 64], 64)}
    return Experiment("Which linear loses how much, and in which layer?", run, fields)


# --- three methods on one layer


def three_methods(lab: Any, job: Any, *, layer: int, bits: int) -> Result:
    """One layer's linears by RTN, GPTQ and AWQ's scales, judged on text that none of the three has seen."""
    got: dict[str, Any] = {}
    grid, ids = Grid(bits), lab.tokenizer.encode(calibrate.calibration_text()[:6000])[:512]
    fresh = held_out(lab, 192)
    job.progress(0.1, f"{len(ids)} tokens to calibrate on, through {layer + 1} layers")
    layer_inputs(lab, ids, layer + 1, lambda idx, block, seen: got.update(block=block, seen=seen))
    job.progress(0.3, f"{len(fresh)} other tokens to judge by")
    layer_inputs(lab, fresh, layer + 1, lambda idx, block, seen: got.update(fresh=seen))
    lost: dict[str, dict[str, float]] = {}
    for at, (name, linear) in enumerate(linears_of(got["block"])):
        if name not in KINDS:
            continue
        job.progress(0.4 + 0.08 * at, f"{KINDS[name]}: three ways to choose its integers")
        w, x = linear.weight.float(), got["seen"][name]
        hessian, size = x.T @ x / len(x), x.abs().mean(0)
        scales, _ = awq.search_scales([w], hessian, size, grid, 64)
        rounded = {
            "RTN": grid.nearest(w, 64).dequantize(),
            "GPTQ": gptq.round_columns(w, gptq.order_of(hessian), grid, 64).dequantize(),
            "AWQ": grid.nearest(w * scales, 64).dequantize() / scales,
        }
        judge = got["fresh"][name]
        power = (judge @ w.T).square().sum()
        lost[KINDS[name]] = {m: float((judge @ (q - w).T).square().sum() / power) for m, q in rounded.items()}
        if KINDS[name] == "q":
            got |= {"size": size, "scales": scales}
    figure = make_subplots(rows=1, cols=2, subplot_titles=("% of the output lost", "inputs of q, by size"))
    for color, shape, method in ((theme.ORANGE, "/", "RTN"), (theme.BLUE, "", "GPTQ"), (theme.GREEN, ".", "AWQ")):
        figure.add_bar(
            x=list(lost), y=[100 * by[method] for by in lost.values()], name=method, row=1, col=1,
            marker={"color": color, "pattern": {"shape": shape}},
        )  # fmt: skip
    order = torch.argsort(got["size"], descending=True)
    for color, dash, name, values in (
        (theme.ORANGE, "solid", "mean |input|", got["size"]), (theme.GREEN, "dot", "AWQ's scale", got["scales"]),
    ):  # fmt: skip
        figure.add_scatter(
            y=values[order].tolist(), name=name, mode="lines", line={"color": color, "dash": dash}, row=1, col=2
        )
    figure.update_yaxes(type="log", row=1, col=2)
    theme.figure_layout(figure, x="", y="")
    figure.update_layout(height=340, barmode="group", legend={"orientation": "h", "y": -0.2})
    rows = [{"linear": name} | {f"{m}, % lost": 100 * v for m, v in by.items()} for name, by in lost.items()]
    data = {"lost": lost, "size": got["size"], "scales": got["scales"], "bits": bits}
    return Result(
        figure, rows, " ".join(judged(data)[:1]), "Measured on text that the methods have not seen", data=data
    )


def judged(data: dict[str, Any]) -> list[str]:
    """Who lost least where, and what AWQ made of the outliers."""
    lost, size = data["lost"], data["size"]
    wins = {m: [n for n, by in lost.items() if min(by, key=lambda k: by[k]) == m] for m in ("RTN", "GPTQ", "AWQ")}
    means = {m: sum(by[m] for by in lost.values()) / len(lost) for m in wins}
    parts = [f"**{m}** on {', '.join(names)}" for m, names in wins.items() if names]
    said = [f"At {data['bits']} bits the least is lost by {'; by '.join(parts)}."]
    best = min(("GPTQ", "AWQ"), key=lambda m: means[m])
    gain = 1 - means[best] / means["RTN"]
    if gain > 0.05:
        said.append(f"Over the layer's linears {best} loses {gain:.0%} less than rounding does.")
    else:
        said.append(
            "Here neither beats plain rounding by much: the calibration text, or the grid, leaves little to gain."
        )
    top, mid = float(size.max()), float(size.median())
    weight = float(data["scales"][int(size.argmax())] / data["scales"].median())
    if top > 5 * mid:
        said.append(
            f"The largest input of q is {top / mid:.0f} times the median one. AWQ gives its weights a grid "
            f"{weight:.1f} times as fine as the median's, and the small inputs pay."
        )
    else:
        said.append(
            f"The largest input of q is only {top / mid:.1f} times the median one: few outliers to protect here."
        )
    return said


def methods_panel(lab: Any) -> Experiment:
    def run(job: Any, **values: Any) -> Result:
        return three_methods(lab, job, **values)

    last = lab.model.config.n_layers - 1
    fields = {
        "layer": slider("Layer", 0, last, min(4, last), step=1, width="200px"),
        "bits": choice("Bits", [2, 3, 4], 3),
    }
    return Experiment("Three ways to choose the integers of one layer: who loses least?", run, fields)
