"""Who looks at whom: attention maps, the logit lens and the hidden states' sizes, on the reader's own words."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import torch

from labkit.model.config import dtype_name
from labkit.model.watch import Inside, look_inside
from labkit.ui import theme
from labkit.ui.controls import choice, slider, text
from labkit.ui.experiment import Experiment, Result

MAX_SHOWN_TOKENS = 48


def measure(lab: Any, job: Any, *, prompt: str, layer: int, head: int, show: str) -> Result:
    """One attention map, the logit lens, or the norms of the hidden states, of the reader's own prompt."""
    job.progress(-1, "reading the prompt")
    ids = lab.tokenizer.encode_prompt(prompt)[:MAX_SHOWN_TOKENS]
    inside = look_inside(lab.model, ids, layers=[layer])
    return VIEWS[show](inside, layer, head)


def _labels(inside: Inside) -> list[str]:
    """Axis labels: the token's text, its spaces visible, its position in front to tell equal ones apart.

    A piece of a character (Chinese, an emoji) is no text alone, and the label says so."""
    return [f"{i} {_readable(token)}"[:18] for i, token in enumerate(inside.tokens)]


def _readable(token: str) -> str:
    return "part of a character" if "\N{REPLACEMENT CHARACTER}" in token else repr(token.replace(" ", "·"))


def _map(inside: Inside, layer: int, head: int) -> Result:
    if layer not in inside.attention:
        raise ValueError(
            f"layer {layer} of {inside.model.name} has latent or compressed attention, of which no map is kept: choose "
            "another view, or a model with keys and values of its own."
        )
    weights, labels = inside.attention[layer][head], _labels(inside)
    past = torch.ones_like(weights, dtype=torch.bool).tril()
    shown = torch.where(past, weights, torch.nan).cpu()
    heat = go.Heatmap(
        z=shown, x=labels, y=labels, colorscale="Viridis", zmin=0, zmax=1, colorbar={"title": "weight"}, xgap=1, ygap=1
    )
    figure = theme.figure_layout(go.Figure([heat]), x="looked at (key)", y="looking (query)", height=520)
    figure.update_yaxes(autorange="reversed")
    last = weights[-1]
    top = last.topk(min(5, len(last)))
    rows = [
        {"token": repr(inside.tokens[i]), "position": i, "weight": round(w, 3)}
        for i, w in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    first = float(weights[:, 0].mean())
    summary = (
        f"Layer {layer}, head {head}: the last token looks most at {rows[0]['token']}; on average a token gives "
        f"**{first:.0%}** of its attention to the very first token."
    )
    return Result(
        figure, rows, summary, "Where the last token looks", data={"weights": weights, "tokens": inside.tokens}
    )


def _lens(inside: Inside, layer: int, head: int) -> Result:
    lens = inside.logit_lens(top=3)
    names = ["embedding", *(f"layer {i}" for i in range(len(lens) - 1))]
    final = lens[-1][0]
    chance = [next((g.probability for g in row if g.token_id == final.token_id), 0.0) for row in lens]
    line = go.Scatter(x=list(range(len(lens))), y=chance, name=f"{final.text!r}", **theme.series(0))
    figure = theme.figure_layout(go.Figure([line]), x="after layer", y="probability of the final answer")
    rows = [
        {"after": name, "best guess": repr(row[0].text), "probability": round(row[0].probability, 3)}
        for name, row in zip(names, lens, strict=True)
    ]
    decided = next(i for i in range(len(lens)) if all(row[0].token_id == final.token_id for row in lens[i:]))
    summary = f"The model settles on **{final.text!r}** after {names[decided]} and keeps it to the end."
    return Result(figure, rows, summary, "What each layer would say if it were the last", data={"lens": lens})


def _norms(inside: Inside, layer: int, head: int) -> Result:
    norms = inside.norms.cpu()
    figure = go.Figure(
        [
            go.Scatter(y=norms[:, 0], name="first token", **theme.series(1)),
            go.Scatter(y=norms[:, 1:].median(1).values, name="median of the others", **theme.series(0)),
        ]
    )
    theme.figure_layout(figure, x="after layer", y="root mean square of the hidden state")
    figure.update_yaxes(type="log")
    rows = [
        {
            "after": "embedding" if i == 0 else f"layer {i - 1}",
            "first token": float(n[0]),
            "others": float(n[1:].median()),
        }
        for i, n in enumerate(norms)
    ]
    summary = "The hidden states swell from layer to layer, and the first token's far more: it is where heads rest."
    return Result(figure, rows, summary, "Size of the hidden states", data={"norms": norms})


VIEWS = {"attention map": _map, "logit lens": _lens, "sizes of the hidden states": _norms}


def panel(lab: Any) -> Experiment:
    """Who looks at whom, on the reader's own words."""

    def run(job: Any, **values: Any) -> Result:
        return measure(lab, job, **values)

    config = lab.model.config
    fields = {
        "prompt": text("Your prompt", "The keys to the old wooden cabinet are on the", rows=2),
        "layer": slider("Layer", 0, config.n_layers - 1, 14, width="190px"),
        "head": slider("Head", 0, config.n_heads - 1, 0, width="190px"),
        "show": choice("Show", list(VIEWS)),
    }
    note = f"Up to {MAX_SHOWN_TOKENS} tokens, in {dtype_name(lab.model.dtype)}: the same forward pass that generates."
    return Experiment("Who looks at whom?", run, fields, note=note)
