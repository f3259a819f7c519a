"""Your own server, or a recording of it: probed from here, or read from what you paste.

Pressing Run only says what would be sent; sending is a choice of its own. Under Voila, where whoever opens the page is
not whoever runs it, no address is asked unless the operator lists it in LABKIT_DIAGNOSE_ALLOW; recordings always work.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from labkit.diagnose import Workload, page, probe, replay
from labkit.diagnose.probes import BUDGETS, plan
from labkit.diagnose.report import Report
from labkit.ui import html
from labkit.ui.controls import choice, text
from labkit.ui.errors import under_voila
from labkit.ui.experiment import Experiment, Result
from labkit.ui.verdict_note import finding_note

ALLOW = "LABKIT_DIAGNOSE_ALLOW"
"""Servers that a Voila page may probe: origins (http://10.0.0.5:8000) with commas between."""
SAY, SEND = "only say what would be sent", "send it"


def refused(url: str) -> str | None:
    """Why this page may not probe ``url``; None when it may."""
    listed = [each.strip().rstrip("/") for each in os.environ.get(ALLOW, "").split(",") if each.strip()]
    if not listed and not under_voila():
        return None
    parts = urlsplit(url.strip())
    if f"{parts.scheme}://{parts.netloc}".lower() in {each.lower() for each in listed}:
        return None
    allowed = f"It may probe {', '.join(listed)}." if listed else "It may probe none."
    return (
        f"this page may not send requests to {url!r}. {allowed} Whoever runs it lists servers in the environment "
        f"variable {ALLOW}. A pasted recording works without."
    )


def examine(job: Any, *, url: str, pasted: str, budget: str, send: str) -> Result:
    """What Run does: a pasted recording first, else the address."""
    if pasted.strip():
        job.progress(-1, "reading what you pasted")
        return shown(replay(pasted))
    if not url.strip():
        raise ValueError("there is no address and no recording: fill in one of the two.")
    if (why := refused(url)) is not None:
        raise ValueError(why)
    planned = plan(Workload(), budget=budget)
    if send == SAY:
        words = planned.describe(url.strip())
        return Result(None, (), f"{words} Nothing was sent: choose **{SEND}** and run again.", data=None)
    job.show(Result(None, (), planned.describe(url.strip())))
    report = probe(
        url.strip(),
        budget=budget,
        announce=lambda words: job.progress(0.0, words),
        progress=job.progress,
        should_stop=lambda: job.stopped,
        api_key=os.environ.get("LABKIT_API_KEY"),
    )
    return shown(report)


def shown(report: Report) -> Result:
    """A report as a panel shows it: pictures, findings, both clocks, and the figures as the table."""
    pictures = f'<div class="lk-charts">{"".join(page.pictures(report))}</div>'
    notes = "".join(map(finding_note, report.findings))
    words = {"measured": [], "simulated": ["Simulated."], "recorded": ["From a recording."]}[report.source]
    words += [fall.sentence] if (fall := report.waterfall()) is not None else []
    bars = page.waterfall_chart(report)
    both = f'<div class="lk-charts"><figure><figcaption>One request, by both clocks</figcaption>{bars}</figure></div>'
    tables = (
        html.table(report.conventions(), "One stream, by each tool's own definition") if report.conventions() else ""
    )
    folded = (
        f'<details class="lk-twin"><summary>What other tools would call it</summary>{tables}</details>'
        if tables
        else ""
    )
    summary = " ".join([*words, *report.notes])
    extra = notes + pictures + (both if bars else "") + folded
    return Result(None, report.figures(), summary, f"{report.where} ({report.source})", extra, data=report)


def panel(url: str = "http://127.0.0.1:8000") -> Experiment:
    """Slow to start, or slow to stream? Any server, or a recording of one."""
    closed = under_voila() and not os.environ.get(ALLOW)
    fields = {
        "url": text(
            "Address" + (" (off here: paste a recording)" if closed else ""),
            "" if closed else url,
            rows=1,
            width="330px",
        ),
        "budget": choice("How much is sent", list(BUDGETS), "small", width="150px"),
        "send": choice("Run will", [SAY, SEND], SAY, width="250px"),
        "pasted": text(
            "Or paste a recording (no network)",
            rows=3,
            placeholder=(
                "what  curl -sN -o /dev/null --trace - --trace-time ...  printed, a HAR file, or labkit's JSON"
            ),
        ),
    }
    note = (
        "vLLM, TensorRT-LLM, SGLang, llama.cpp, TGI, Triton, labkit: give the address. Sent from where this "
        "page's kernel runs, to this address and to nothing else; a key is read from LABKIT_API_KEY."
    )
    return Experiment("Slow to start, or slow to stream?", examine, fields, note=note)
