"""A forecast as a page: ceiling, forecast and measurement of each phase; every switch ranked."""

from __future__ import annotations

from html import escape
from statistics import median
from typing import Any

from labkit.perf import advice as advising
from labkit.perf.forecast import Forecast, StageForecast
from labkit.perf.trace import Trace
from labkit.ui import html, theme
from labkit.ui.phase_bars import phase_words
from labkit.ui.words import say, sentences

PHASES_SHOWN = 6


def comparison(found: Forecast, trace: Trace) -> str:
    """Ceiling, forecast and measurement of both stages and their largest phases, as bars and as figures."""
    itl = trace.paced_s
    stages = (
        ("prefill", "Prefill: time to first token", found.prefill, trace.ttft_s, 1),
        ("decode", "Decode: each later token", found.decode, median(itl) if itl else None, len(itl)),
    )
    tables = "".join(
        _table(say(title), stage, took, trace.stage_phases(name), n_steps)
        for name, title, stage, took, n_steps in stages
    )
    bars = (
        (theme.GREY, say("ceiling: the bytes or FLOPs at this machine's limits")),
        (theme.SKY, say("forecast")),
        (theme.ORANGE, say("measured")),
    )
    legend = " &nbsp; ".join(f"{_swatch(color)} {words}" for color, words in bars)
    return f'{tables}<div class="lk-muted" style="margin-top:6px">{legend}</div>'


def _table(title: str, stage: StageForecast, took: float | None, phases: dict[str, float], n_steps: int) -> str:
    rows = [(f"<b>{say('all of it')}</b>", stage.floor_s, stage.time.value, took, _bound(stage.bound))]
    largest = sorted(stage.phases.values(), key=lambda p: -p.forecast_s)[:PHASES_SHOWN]
    for phase in largest:
        measured = phases[phase.phase] / max(n_steps, 1) if phase.phase in phases else None
        name = escape(phase_words(phase.phase))
        rows.append((name, phase.floor_s, phase.forecast_s, measured, _bound(phase.bound)))
    top = max(max(floor, expected, seen or 0.0) for _, floor, expected, seen, _ in rows) or 1.0
    body = "".join(
        f'<tr><th scope="row">{name}</th><td style="width:40%;min-width:150px">{_bars(floor, expected, seen, top)}</td>'
        + "".join(f'<td class="is-number">{_ms(x)}</td>' for x in (floor, expected, seen))
        + f"<td>{bound}</td></tr>"
        for name, floor, expected, seen, bound in rows
    )
    counts = {"mfu": stage.mfu, "mbu": stage.mbu, "intensity": stage.intensity}
    shares = say("MFU {mfu:.0%}, MBU {mbu:.0%}, {intensity:.3g} FLOP a byte (forecast)", **counts)
    columns = ("ceiling, ms", "forecast, ms", "measured, ms")
    heads = "".join(f'<th scope="col" class="is-number">{say(column)}</th>' for column in columns)
    return (
        f'<div class="lk-scroll"><table class="lk-table" style="width:100%"><caption><b>{escape(title)}</b> '
        f"&nbsp; {shares}</caption>"
        f'<thead><tr><th scope="col">{say("phase")}</th><th scope="col"></th>{heads}'
        f'<th scope="col">{say("bound by")}</th></tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _bars(floor: float, expected: float, seen: float | None, top: float) -> str:
    """Three thin bars above each other; the figures beside them are their text."""
    bars = [(floor, theme.GREY), (expected, theme.SKY), (seen or 0.0, theme.ORANGE)]
    return "".join(
        f'<div style="height:4px;margin:2px 0;width:{100 * value / top:.1f}%;min-width:1px;background:{color}"></div>'
        for value, color in bars
    )


def _swatch(color: str) -> str:
    return f'<span aria-hidden="true" style="display:inline-block;width:14px;height:6px;background:{color}"></span>'


def _bound(name: str) -> str:
    return say({"compute": "arithmetic", "memory": "memory", "overhead": "overhead"}[name])


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else html.number(seconds * 1e3)


def verdict(found: Forecast, trace: Trace) -> str:
    """Forecast against measurement in one sentence."""
    itl = trace.paced_s
    parts = [
        _met(say("First token"), found.ttft, trace.ttft_s),
        _met(say("Each later one"), found.itl, median(itl) if itl else None),
    ]
    tail = say("The machine was busy while it was measured.") if found.machine.busy else ""
    return sentences(*parts, tail)


def _met(name: str, expected: Any, seen: float | None) -> str:
    if seen is None:
        return ""
    met = {"which": name, "expected": _ms(expected.value), "seen": _ms(seen), "error": seen / expected.value - 1}
    if seen in expected:
        return say("{which}: forecast {expected} ms, measured {seen} ms ({error:+.0%}, inside its interval).", **met)
    return say("{which}: forecast {expected} ms, measured {seen} ms ({error:+.0%}, outside its interval).", **met)


def ranking(found: advising.Advice) -> str:
    """Every switch's predicted effect, the best first, and those that do not run here."""
    out = html.table(
        [_said(row) for row in found.rows()],
        say(
            "Predicted, best first for {goal}; one switch at a time, then together",
            goal=say(advising.GOALS[found.goal]),
        ),
    )
    if any(not switch.measured for switch in found.switches):
        rough = say(
            "Some engines are not measured yet: their lines come from bytes and FLOPs alone. Ask again, and the next "
            "ones are measured."
        )
        out += f'<div class="lk-muted">{rough}</div>'
    if found.unavailable:
        items = "".join(f"<li>{escape(name)}: {escape(why)}</li>" for name, why in found.unavailable.items())
        out += f'<details class="lk-twin"><summary>{say("What does not run here")}</summary><ul>{items}</ul></details>'
    return out


def _said(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the advice with its words in the reader's language."""
    return {name: say(value) if isinstance(value, str) else value for name, value in row.items()}


def side_by_side(label: str, before: Forecast, was: Trace, after: Forecast, now: Trace) -> str:
    """Two runs, each with what was predicted for it."""
    rows = []
    for name, found, trace in ((say(label), before, was), (say("with the best switch"), after, now)):
        itl = trace.paced_s
        rows.append(
            {
                "run": name,
                "TTFT forecast, ms": found.ttft.value * 1e3,
                "TTFT measured": (trace.ttft_s or 0.0) * 1e3,
                "ITL forecast, ms": found.itl.value * 1e3,
                "ITL measured": median(itl) * 1e3 if itl else None,
            }
        )
    return html.table(rows, "Prediction and measurement side by side")
