"""Small charts as SVG text, for a report that must open anywhere: axes, dots, lines, bars; nothing interactive.

Colours come from the page's style sheet by class, so a chart follows light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import floor, log10

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 40
Point = tuple[float, float]


def xy(series: Sequence[tuple[str, Sequence[Point]]], *, x: str, y: str, lines: Sequence[Sequence[Point]] = ()) -> str:
    """Dots of each series, and lines; axes from zero. ``x`` and ``y`` name the axes with their units."""
    points = [p for _, dots in series for p in dots] + [p for line in lines for p in line]
    if not points:
        return ""
    right, top = _ceiling(max(p[0] for p in points)), _ceiling(max(p[1] for p in points))

    def at(p: Point) -> tuple[float, float]:
        return (
            LEFT + (WIDTH - LEFT - RIGHT) * p[0] / right,
            HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * p[1] / top,
        )

    parts = [_axes(right, top, x, y)]
    for line in lines:
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in map(at, line))
        parts.append(f'<polyline class="fit" points="{path}"/>')
    for idx, (name, dots) in enumerate(series):
        for p in dots:
            a, b = at(p)
            title = f"<title>{escape(name)}: {p[0]:,.4g}, {p[1]:,.4g}</title>"
            mark = (
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4">' if idx == 0
                else f'<rect x="{a - 3.5:.1f}" y="{b - 3.5:.1f}" width="7" height="7">'
            )  # fmt: skip
            parts.append(f'<g class="s{idx}">{mark}{title}{"</circle>" if idx == 0 else "</rect>"}</g>')
    legend = " · ".join(f"{'●' if idx == 0 else '■'} {name}" for idx, (name, _) in enumerate(series) if name)
    return _svg("".join(parts), HEIGHT, f"{y} against {x}") + (
        f'<div class="legend">{escape(legend)}</div>' if legend else ""
    )


def bars(rows: Sequence[tuple[str, str, float, float]]) -> str:
    """A waterfall: (who, what, from, to) in milliseconds, one row each."""
    if not rows:
        return ""
    end = max(to for *_, to in rows) or 1.0
    height, left = 24 * len(rows) + 8, 150
    parts = []
    for idx, (who, what, begin, to) in enumerate(rows):
        a = left + (WIDTH - left - 70) * begin / end
        width = max(1.5, (WIDTH - left - 70) * (to - begin) / end)
        y = 6 + 24 * idx
        kind = "s0" if who == "client" else "s1"
        parts.append(
            f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(f"{who}: {what}")}</text>'
            f'<g class="{kind}"><rect x="{a:.1f}" y="{y}" width="{width:.1f}" height="17"/></g>'
            f'<text x="{a + width + 5:.1f}" y="{y + 13}">{_figure(to - begin)} ms</text>'
        )
    return _svg("".join(parts), height, "waterfall of one request")


def ticks(times_ms: Sequence[float], end_ms: float) -> str:
    """When each event came: a line each on one axis, so that bursts and pauses are seen."""
    end = max([end_ms, *times_ms, 1e-9])
    inner = WIDTH - 2 * RIGHT
    marks = "".join(
        f'<line class="tick" x1="{RIGHT + inner * t / end:.1f}" x2="{RIGHT + inner * t / end:.1f}" y1="8" y2="44"/>'
        for t in times_ms
    )
    axis = f'<line class="axis" x1="{RIGHT}" x2="{WIDTH - RIGHT}" y1="48" y2="48"/>'
    words = (
        f'<text x="{RIGHT}" y="66">0</text><text x="{WIDTH - RIGHT}" y="66" text-anchor="end">{_figure(end)} ms</text>'
    )
    return _svg(marks + axis + words, 72, "when each event came")


def _axes(right: float, top: float, x: str, y: str) -> str:
    base, parts = HEIGHT - BOTTOM, []
    for share in (0.0, 0.5, 1.0):
        level = base - (base - TOP) * share
        at = LEFT + (WIDTH - LEFT - RIGHT) * share
        anchor = "end" if share == 1.0 else "middle"
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{level + 4:.1f}" text-anchor="end">{_figure(top * share)}</text>')
        parts.append(f'<text x="{at:.1f}" y="{base + 16}" text-anchor="{anchor}">{_figure(right * share)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x)}</text>')
    parts.append(f'<text class="unit" x="{LEFT + 4}" y="{TOP + 17}">{escape(y)}</text>')
    return "".join(parts)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ceiling(value: float) -> float:
    """The next 1, 2, 2.5 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    scale = 10.0 ** floor(log10(value))
    return next(step * scale for step in (1, 2, 2.5, 5, 10) if step * scale >= value * 0.999)


def _svg(body: str, height: float, words: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(words)}">{body}</svg>'
