"""The live picture of a run: its figures, its text, and one bar a stage whose segments are the phases.

A small widget of our own, because it must move ten times a second: one message a tick carries the latest
state, and the page keeps its nodes and only changes their widths.
"""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets

from labkit.perf.trace import Trace
from labkit.ui import html
from labkit.ui.theme import PHASES, STATIC, css_background
from labkit.ui.words import counted, say

STAGES = {"prefill": "Prefill", "decode": "Decode"}


class PhaseBars(anywidget.AnyWidget):
    """``show(trace)`` draws the bars; ``show(trace, text=..., tiles=...)`` the whole run."""

    _esm = STATIC / "phase_bars.js"
    state = traitlets.Dict().tag(sync=True)
    looks = traitlets.Dict().tag(sync=True)
    text_label = traitlets.Unicode().tag(sync=True)

    def __init__(self) -> None:
        looks = {name: {"background": css_background(look), "ink": look.ink} for name, look in PHASES.items()}
        label = say("the model's text")
        super().__init__(looks=looks, text_label=label, state={"stages": [stage_row(None, stage) for stage in STAGES]})

    def show(self, trace: Trace | None, **parts: Any) -> None:
        """Draw ``trace`` (None: empty bars). ``parts``: text, prompt, running, tiles."""
        rows = [stage_row(trace, stage) for stage in STAGES]
        legend = [] if trace is None else legend_of(trace)
        self.state = {"stages": rows, "legend": legend, **parts}


def stage_row(trace: Trace | None, stage: str) -> dict[str, Any]:
    """One bar: its phases' shares of the stage's named time, in pipeline order."""
    row: dict[str, Any] = {
        "name": say(STAGES[stage]),
        "note": "",
        "total": "",
        "segments": [],
        "summary": say("nothing yet"),
    }
    if trace is None:
        return row
    phases = trace.stage_phases(stage)
    seconds, named_s = trace.stage_s(stage), sum(phases.values())
    if named_s <= 0:
        return row
    row["note"] = _note(trace, stage)
    row["total"] = duration(seconds)
    for name, value in phases.items():
        share = value / named_s
        label = phase_words(name)
        of = (
            "{phase}: {took}, {share:.0%} of prefill"
            if stage == "prefill"
            else "{phase}: {took}, {share:.0%} of decode"
        )
        title = say(of, phase=label, took=duration(value), share=share)
        row["segments"].append({"name": name, "label": label, "share": share, "title": title})
    largest = sorted(phases, key=lambda name: -phases[name])[:4]
    words = ", ".join(f"{phase_words(name)}: {duration(phases[name])}" for name in largest)
    took = {"stage": row["name"], "took": row["total"], "phases": words}
    row["summary"] = say("{stage} took {took}. Largest phases: {phases}.", **took)
    return row


def phase_words(name: str) -> str:
    """A phase's name for people: "lm head" for lm_head."""
    return say(name.replace("_", " "))


def legend_of(trace: Trace) -> list[dict[str, Any]]:
    """Every phase that took time, with its share of the run."""
    phases = trace.phases
    total = sum(phases.values())
    return [
        {"name": name, "label": f"{phase_words(name)} {_percent(value / total)}"}
        for name, value in phases.items()
        if value > 0
    ]


def _percent(share: float) -> str:
    return say("under 1 %") if share < 0.005 else f"{100 * share:.0f} %"


def phase_rows(trace: Trace) -> list[dict[str, Any]]:
    """The bars as rows of a table: milliseconds by phase and stage, and what no phase was charged with."""
    stages = {stage: trace.stage_phases(stage) for stage in STAGES}
    rows = [
        {
            "phase": phase_words(name),
            "prefill ms": stages["prefill"].get(name, 0.0) * 1e3,
            "decode ms": stages["decode"].get(name, 0.0) * 1e3,
            "share": f"{seconds / trace.wall_s:.1%}" if trace.wall_s else "–",
        }
        for name, seconds in trace.phases.items()
    ]
    rest = [(trace.stage_s(stage) - sum(stages[stage].values())) * 1e3 for stage in STAGES]
    share = f"{1 - trace.coverage:.1%}"
    return [*rows, {"phase": say("in no phase"), "prefill ms": rest[0], "decode ms": rest[1], "share": share}]


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(0.00042), duration(0.0123), duration(2.5)
    ('0.42 ms', '12.3 ms', '2.50 s')
    """
    return f"{html.number(seconds)} s" if seconds >= 1 else f"{html.number(seconds * 1e3)} ms"


def _note(trace: Trace, stage: str) -> str:
    if stage == "prefill":
        return counted(trace.n_prompt_tokens, "{n:,} prompt token", "{n:,} prompt tokens, all at once")
    n = sum(step.stage == "decode" for step in trace.steps)
    if not n:
        return say("no token")
    each = duration(trace.stage_s(stage) / n)
    return counted(n, "{n:,} token, {each}", "{n:,} tokens, one after the other, {each} each", each=each)
