"""Lesson 02, a map of words: rows of the embedding table, laid flat along the two directions that tell most apart."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import torch
from torch import Tensor

from labkit.ui import theme
from labkit.ui.controls import text
from labkit.ui.experiment import Result
from labkit.ui.live import Live
from labkit.ui.words import counted, say, sentences

WORDS = "cat dog horse bird fish\nParis London Rome Berlin Tokyo\none two three four five\nrun walk jump swim fly"
MAX_WORDS = 40
EDGE = 0.15


def flat(rows: Tensor) -> tuple[Tensor, float]:
    """Rows (N, M) as directions, on their two principal axes: (N, 2), and the share of their variance that these hold.

    Raises ValueError for fewer than three.
    """
    if len(rows) < 3:
        raise ValueError(f"{len(rows)} words: a map needs three at least.")
    directions = torch.nn.functional.normalize(rows.double(), dim=-1)
    centred = directions - directions.mean(0)
    _, values, axes = torch.linalg.svd(centred, full_matrices=False)
    axes = axes[:2] * axes[:2].gather(1, axes[:2].abs().argmax(1, keepdim=True)).sign()  # a sign that repeats
    return centred @ axes.T, float(values[:2].square().sum() / values.square().sum().clamp_min(1e-30))


def groups_of(tokenizer: Any, words: str) -> tuple[list[list[tuple[str, int]]], list[str]]:
    """(word, token id) line by line, and the words that are left out because they are more than one token.

    A word is looked up as it stands within a text, with a space before it."""
    groups, left_out = [], []
    for line in words.splitlines():
        group = []
        for word in line.replace(",", " ").split():
            ids = tokenizer.encode(f" {word}")
            group.append((word, ids[0])) if len(ids) == 1 else left_out.append(word)
        if group:
            groups.append(group)
    return groups, left_out


@torch.inference_mode()
def draw(model: Any, *, words: str) -> Result:
    """A dot a word, a colour and a shape a line of the box."""
    groups, left_out = groups_of(model.tokenizer, words)
    flat_list = [pair for group in groups for pair in group][:MAX_WORDS]
    ids = torch.tensor([i for _, i in flat_list], device=model.device, dtype=torch.int64)
    rows = model.transformer.embedding(ids).float().cpu()
    places, share = flat(rows)
    cosines = torch.nn.functional.cosine_similarity(rows[:, None], rows[None], dim=-1).fill_diagonal_(-1)
    closest = cosines.argmax(1).tolist()
    names = [word for word, _ in flat_list]
    figure, at = go.Figure(), 0
    same = 0
    for idx, group in enumerate(groups):
        mine = range(at, min(at + len(group), len(names)))
        at += len(group)
        if not mine:
            continue
        same += sum(closest[i] in mine for i in mine)
        look = theme.series(idx)
        figure.add_trace(
            go.Scatter(
                x=[float(places[i, 0]) for i in mine],
                y=[float(places[i, 1]) for i in mine],
                text=[names[i] for i in mine],
                mode="markers+text",
                textposition="top center",
                marker=look["marker"],
                name=say("line {n}", n=idx + 1),
            )
        )
    theme.figure_layout(figure, x=say("the direction that tells most apart"), y=say("the next one"), height=440)
    low, high = float(places[:, 0].min()), float(places[:, 0].max())
    figure.update_xaxes(range=[low - EDGE * (high - low), high + EDGE * (high - low)])  # a word is wider than its dot
    summary = sentences(
        say(
            "Of **{same} of {n}** words the nearest is one of the same line. The two directions hold {share:.0%} of "
            "what tells these words apart: a map leaves out the rest.",
            same=same,
            n=len(names),
            share=share,
        ),
        counted(
            len(left_out),
            "Left out, because it is more than one token: {words}.",
            "Left out, because they are more than one token: {words}.",
            words=", ".join(left_out),
        )
        if left_out
        else "",
    )
    table = [
        {"word": names[i], "nearest of them": names[closest[i]], "cosine": round(float(cosines[i, closest[i]]), 3)}
        for i in range(len(names))
    ]
    return Result(figure, table, summary, "Each word's nearest neighbour among them", data={"same": same})


def panel(lab: Any) -> Live:
    """Type words of your own, a kind on each line."""
    model = lab.model

    def show(words: str) -> Result:
        return draw(model, words=words)

    fields = {"words": text("Words, a kind on each line", WORDS, rows=5)}
    return Live("A map of your words: does the table know which belong together?", show, fields)
