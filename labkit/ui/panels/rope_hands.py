"""Lesson 02, the clock of many hands: a query and a key turned by their positions, pair by pair."""

from __future__ import annotations

import math
from typing import Any

from labkit.model.config import Rope
from labkit.model.rope import inverse_frequencies
from labkit.ui.controls import slider
from labkit.ui.experiment import Result
from labkit.ui.live import Live
from labkit.ui.panels.rope import turned_by
from labkit.ui.words import say

N_DIALS = 6
CENTRE, RADIUS = 60, 50


def frequencies(rope: Rope, width: int, n: int = N_DIALS) -> dict[int, float]:
    """Radians a token of some of the pairs, from the fastest to the slowest, by the pair's number."""
    found = inverse_frequencies(rope, width).double().tolist()
    picked = sorted({round(i * (len(found) - 1) / (n - 1)) for i in range(n)})
    return {pair: found[pair] for pair in picked}


def angles(frequency: float, at_query: int, at_key: int) -> tuple[float, float, float]:
    """Degrees, 0 to 360: the query's hand, the key's, and from the key's to the query's.

    >>> angles(math.pi / 2, 3, 1)
    (270.0, 90.0, 180.0)
    """
    turns = (at_query * frequency, at_key * frequency, (at_query - at_key) * frequency)
    query, key, between = (round(math.degrees(turn) % 360, 6) % 360 for turn in turns)
    return query, key, between


def draw(dials: dict[int, float], *, at_query: int, at_key: int, moved: int) -> Result:
    """One dial a pair. ``moved`` is added to both positions."""
    at_query, at_key = at_query + moved, at_key + moved
    rows, pictures = [], []
    for pair, frequency in dials.items():
        query, key, between = angles(frequency, at_query, at_key)
        rows.append(
            {
                "pair": pair,
                "tokens for a full turn": round(2 * math.pi / frequency, 1),
                "query's hand, °": round(query, 1),
                "key's hand, °": round(key, 1),
                "between them, °": round(between, 1),
            }
        )
        pictures.append(_dial(pair, 2 * math.pi / frequency, query, key, between))
    legend = say("the query's hand ends in a dot, the key's in a square; shaded: from the key to the query")
    extra = f'<div class="lk-dials">{"".join(pictures)}</div><div class="lk-muted">{legend}</div>'
    summary = say(
        "The query stands at {at_query}, the key at {at_key}: **{distance} tokens apart**. Each angle between two "
        "hands is that distance times the pair's frequency, wherever the two stand.",
        at_query=at_query,
        at_key=at_key,
        distance=abs(at_query - at_key),
    )
    return Result(None, rows, summary, "The hands of some pairs, in degrees", extra=extra)


def _dial(pair: int, a_turn: float, query: float, key: float, between: float) -> str:
    said = say(
        "pair {pair}: query's hand at {query:.0f}°, key's at {key:.0f}°, {between:.0f}° between them",
        pair=pair,
        query=query,
        key=key,
        between=between,
    )
    words = say("a turn in {n:,.0f} tokens", n=a_turn)
    (qx, qy), (kx, ky) = _point(query), _point(key)
    return (
        f'<figure><svg viewBox="0 0 120 120" role="img" aria-label="{said}">'
        f'<circle class="axis" cx="{CENTRE}" cy="{CENTRE}" r="{RADIUS}" fill="none"/>{_wedge(key, between)}'
        f'<line class="hand is-key" x1="{CENTRE}" y1="{CENTRE}" x2="{kx}" y2="{ky}"/>'
        f'<rect class="end is-key" x="{kx - 5:.1f}" y="{ky - 5:.1f}" width="10" height="10"/>'
        f'<line class="hand is-query" x1="{CENTRE}" y1="{CENTRE}" x2="{qx}" y2="{qy}"/>'
        f'<circle class="end is-query" cx="{qx}" cy="{qy}" r="5.5"/></svg>'
        f"<figcaption>{say('pair {pair}', pair=pair)}<br>{words}<br><b>{between:.0f}°</b></figcaption></figure>"
    )


def _point(degrees: float, radius: float = RADIUS - 6) -> tuple[float, float]:
    """Where a hand ends: 0° at three o'clock, counter-clockwise, as mathematics turns."""
    angle = math.radians(degrees)
    return round(CENTRE + radius * math.cos(angle), 1), round(CENTRE - radius * math.sin(angle), 1)


def _wedge(key: float, between: float) -> str:
    """From the key's hand to the query's, counter-clockwise."""
    (x0, y0), (x1, y1) = _point(key, 30), _point(key + between, 30)
    large = int(between > 180)
    return f'<path class="between" d="M{CENTRE} {CENTRE} L{x0} {y0} A30 30 0 {large} 0 {x1} {y1} Z"/>'


def panel(lab: Any) -> Live:
    """Move the query, the key, or both."""
    dials = frequencies(*turned_by(lab.model, 0))

    def show(**values: int) -> Result:
        return draw(dials, **values)

    fields = {
        "at_query": slider("The query's position", 0, 64, 14, width="220px"),
        "at_key": slider("The key's position", 0, 64, 2, width="220px"),
        "moved": slider("Both moved by", 0, 512, 0, width="220px"),
    }
    return Live("A clock of many hands: which angles change when a token moves?", show, fields)
