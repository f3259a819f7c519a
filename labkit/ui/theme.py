"""Colours that mean something, and a look that follows the page from light to dark.

Okabe and Ito's palette (2008), readable with every common colour blindness; because it has eight colours and a
run has twelve phases, and because colour alone is never enough, each phase also has a pattern.
Everything neutral (text, lines, surfaces) comes from the page's own theme through ``static/style.css``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

STATIC = Path(__file__).resolve().parent / "static"

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#8C8C94"

COLORS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW, GREY)
"""Series colours, in the order a figure uses them."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")

NEUTRAL = "#7a7a80"
"""Text in a figure: at least 4:1 on white and on JupyterLab's dark background alike."""
GRID = "rgba(128, 128, 136, 0.22)"


@dataclass(frozen=True)
class PhaseLook:
    """How one phase looks everywhere. ``pattern`` is plotly's marker pattern: "" is plain."""

    color: str
    pattern: str = ""
    ink: str = "#16161a"
    """Text on top of the colour."""


PHASES: dict[str, PhaseLook] = {
    "tokenize": PhaseLook(SKY, "."),
    "embed": PhaseLook(YELLOW),
    "attention": PhaseLook(BLUE, ink="#ffffff"),
    "ffn": PhaseLook(ORANGE),
    "norm": PhaseLook(SKY),
    "lm_head": PhaseLook(GREEN),
    "sample": PhaseLook(VERMILION),
    "kv_cache": PhaseLook(PURPLE),
    "draft": PhaseLook(PURPLE, "/"),
    "verify": PhaseLook(GREEN, "/"),
    "detokenize": PhaseLook(YELLOW, "/"),
    "schedule": PhaseLook(GREY, "\\"),
}
"""One look a phase; the names and their order are the timer's."""


def phase_look(name: str) -> PhaseLook:
    """The look of a phase, also of one that a later timer adds."""
    return PHASES.get(name, PhaseLook(GREY))


def series(idx: int) -> dict[str, Any]:
    """Colour, dash and symbol of the idx-th series: pass as ``**series(0)`` to ``go.Scatter``.

    >>> series(1)["line"]
    {'color': '#E69F00', 'dash': 'dash', 'width': 2.5}
    """
    color = COLORS[idx % len(COLORS)]
    return {
        "line": {"color": color, "dash": DASHES[idx % len(DASHES)], "width": 2.5},
        "marker": {"color": color, "symbol": SYMBOLS[idx % len(SYMBOLS)], "size": 8},
    }


def figure_layout(
    figure: Any, *, title: str | None = None, x: str | None = None, y: str | None = None, height: int = 360
) -> Any:
    """Give a plotly figure labkit's look, in place; returns it.

    Transparent, so that it stands on a light and on a dark page; text in a neutral grey that reads on both.
    ``x`` and ``y`` name the axes with their units: "prompt tokens", "ms a token".
    """
    axis = {
        "gridcolor": GRID,
        "linecolor": GRID,
        "zerolinecolor": GRID,
        "ticks": "",
        "automargin": True,
        "title": {"standoff": 12},
    }
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 13, "color": NEUTRAL},
        colorway=list(COLORS),
        height=height,
        margin={"l": 12, "r": 16, "t": 56 if title else 28, "b": 12},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.01, "xanchor": "left", "x": 0, "font": {"size": 13}},
        hoverlabel={"font": {"size": 13}},
        bargap=0.35,
        xaxis=axis,
        yaxis=axis,
    )
    if title:
        figure.update_layout(title={"text": title, "font": {"size": 16}, "x": 0, "xanchor": "left", "y": 0.98})
        figure.update_layout(title_yanchor="top", legend_y=1.0)
    if x:
        figure.update_xaxes(title_text=x)
    if y:
        figure.update_yaxes(title_text=y)
    return figure


@cache
def css() -> str:
    """The style sheet as a ``<style>`` element; every panel and header carries it."""
    return f"<style>{(STATIC / 'style.css').read_text(encoding='utf-8')}</style>"


_PATTERNS = {
    "/": "repeating-linear-gradient(135deg, {ink} 0 1.5px, transparent 1.5px 7px), ",
    "\\": "repeating-linear-gradient(45deg, {ink} 0 1.5px, transparent 1.5px 7px), ",
    ".": "radial-gradient({ink} 1px, transparent 1.3px) 0 0 / 6px 6px, ",
}


def css_background(look: PhaseLook) -> str:
    """A phase's colour and pattern as a CSS background."""
    pattern = _PATTERNS.get(look.pattern, "").format(ink="rgba(20, 20, 26, 0.55)")
    return f"{pattern}{look.color}"
