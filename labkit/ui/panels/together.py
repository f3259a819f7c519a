"""Many visitors, one model: each page asks the same engine, a ``labkit serve`` beside it, through ``labkit.Remote``.

A page's own kernel then loads no model. Where the engine is says whoever runs the page (``labkit demo
demo_together.ipynb --engine URL``), never its visitor.
"""

from __future__ import annotations

import os
from typing import Any

import plotly.graph_objects as go

from labkit.serving.remote import ENGINE_VARIABLE, Remote
from labkit.ui import html, theme
from labkit.ui.controls import slider, text
from labkit.ui.experiment import Experiment, Result
from labkit.ui.words import counted, say

STAGES = (
    ("queue", "waits for others", theme.GREY, "\\"),
    ("prefill", "prefill", theme.BLUE, "."),
    ("decode", "decode", theme.ORANGE, ""),
)
N_SHOWN = 8


def engine() -> str:
    """The address of the engine. Raises ValueError that says how to start one."""
    url = os.environ.get(ENGINE_VARIABLE, "").strip()
    if not url:
        raise ValueError(
            "no engine was named. In one terminal: labkit serve. In another: labkit demo demo_together.ipynb --engine "
            "http://127.0.0.1:8000"
        )
    return url


def measure(job: Any, *, prompt: str, n_tokens: int) -> Result:
    """One request of this visitor, its text as it comes, and where its time went: by the engine's own account."""
    remote = Remote(engine(), api_key=os.environ.get("LABKIT_API_KEY"))
    run = remote.run(prompt, max_new_tokens=n_tokens, chat=True)
    said = ""
    for piece in run:
        said += piece
        if job.stopped:
            run.stop()
        job.progress(-1, say("the engine answers"))
        job.show(Result(extra=answer_html(said)))
    job.check()
    trace = run.result().trace
    timings = trace.meta["server_timings"]
    row = {
        "tokens": trace.n_tokens,
        "TTFT, ms": (trace.ttft_s or 0.0) * 1e3,
        "waited for others, ms": timings.get("queue_ms", 0.0),
        "prefill, ms": timings.get("prompt_ms", 0.0),
        "decode, ms": timings.get("predicted_ms", 0.0),
        "prompt tokens found stored": int(timings.get("cache_n", 0)),
    }
    rows = [*job.history, row][-N_SHOWN:]
    summary = counted(
        row["tokens"],
        "{n} token. It came after **{ttft} ms**, of which this request waited {waited} ms for other visitors.",
        "{n} tokens. The first came after **{ttft} ms**, of which this request waited {waited} ms for other visitors.",
        ttft=html.number(row["TTFT, ms"]),
        waited=html.number(row["waited for others, ms"]),
    )
    return Result(figure(rows), rows, summary, "Your requests, newest last", extra=answer_html(said), data=row)


def answer_html(said: str) -> str:
    """The answer so far, with what it contains made harmless."""
    return f'<div class="lk-note" style="white-space:pre-wrap">{html.escape(said)}</div>' if said else ""


def figure(rows: list[dict[str, Any]]) -> Any:
    """One bar a request: what it waited, its prefill, its decode."""
    names = [say("request {n}", n=n) for n in range(1, len(rows) + 1)]
    chart = go.Figure()
    for key, label, color, pattern in STAGES:
        column = {"queue": "waited for others, ms", "prefill": "prefill, ms", "decode": "decode, ms"}[key]
        look = {"shape": pattern, "fillmode": "overlay", "fgcolor": "#16161a", "fgopacity": 0.6}
        chart.add_bar(
            orientation="h",
            name=say(label),
            y=names,
            x=[row[column] / 1e3 for row in rows],
            marker={"color": color, "pattern": look, "line": {"width": 0}},
        )
    theme.figure_layout(chart, x=say("seconds, by the engine's clock"), height=150 + 34 * len(rows))
    chart.update_layout(barmode="stack", bargap=0.3, legend={"y": 1.12})
    chart.update_yaxes(autorange="reversed")
    return chart


def panel() -> Experiment:
    """Ask the engine that other visitors ask, too."""
    fields = {
        "prompt": text("Your question", "Why is the sky blue?", rows=2, width="420px"),
        "n_tokens": slider("Answer at most", 8, 128, 48, step=8),
    }
    return Experiment(
        "One model, many visitors: who waits for whom?",
        measure,
        fields,
        note=(
            "This page has no model of its own. It asks an engine that every other page asks, too; requests of several "
            "visitors are computed in the same steps. Open the page twice and press Run in both."
        ),
    )
