"""Several contenders measured in turn: their values, the bars that show median and range, and the same as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import plotly.graph_objects as go
import torch

from labkit.perf.busy import BusyWatch
from labkit.perf.machine import BUSY_SHARE
from labkit.ui import spread, theme
from labkit.ui.words import say

N_TURNS = 3
ROUGH = "Other programs were busy meanwhile: take it as rough."
Turns = dict[str, list[Any]]


def take_turns(job: Any, contenders: Mapping[str, Callable[[], Any]]) -> tuple[Turns, bool]:
    """Every contender's values, measured A B C A B C ...; and whether other programs were busy meanwhile."""
    found: Turns = {name: [] for name in contenders}
    with BusyWatch() as watch, torch.inference_mode():
        for turn in range(N_TURNS):
            for idx, (name, measure) in enumerate(contenders.items()):
                at = (turn * len(contenders) + idx) / (N_TURNS * len(contenders))
                job.progress(at, say("turn {n} of {all}: {what}", n=turn + 1, all=N_TURNS, what=name))
                found[name].append(measure())
    return found, watch.share > BUSY_SHARE


def bars(turns: Turns, least: Sequence[float], unit: str) -> go.Figure:
    """One bar a contender: median, range, and the least that this machine's ceilings allow."""
    names = list(turns)
    middle = [median(values) for values in turns.values()]
    error = spread.error_bars(list(turns.values()))
    figure = go.Figure(
        [
            go.Bar(
                x=names, y=middle, error_y=error, name=say("measured: median and range"), marker={"color": theme.BLUE}
            ),
            go.Scatter(
                x=names,
                y=list(least),
                name=say("ceiling: no faster on this machine"),
                mode="markers",
                marker={"symbol": "line-ew-open", "size": 42, "line": {"width": 3}, "color": theme.VERMILION},
            ),
        ]
    )
    theme.figure_layout(figure, x="", y=unit, height=340)
    return figure.update_yaxes(rangemode="tozero")


def rows_of(turns: Turns, unit: str) -> list[dict[str, Any]]:
    """The same as a table."""
    middle = say("median, {unit}", unit=say(unit))
    return [
        {"what": name, middle: median(all_), "lowest": min(all_), "highest": max(all_), "turns": len(all_)}
        for name, all_ in turns.items()
    ]
