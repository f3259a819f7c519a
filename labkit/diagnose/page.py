"""The HTML report: one file, readable in light and dark, wide and narrow; every figure has its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from labkit.diagnose import charts, conventions
from labkit.diagnose.measured import n_fresh, n_prompt
from labkit.diagnose.stream import Stream
from labkit.perf.verdict import Finding

if TYPE_CHECKING:
    from labkit.diagnose.report import Report

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c21; --soft: #5b5b64; --line: #d9d9df; --back: #ffffff; --card: #f6f6f8;
  --one: #0072b2; --two: #d55e00; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececf0; --soft: #a5a5af; --line: #3a3a42; --back: #17171b;
  --card: #212127; --one: #56b4e9; --two: #e69f00; } }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, sans-serif; }
main { max-width: 1020px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 24px; line-height: 1.25; margin: 4px 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 32px 0 8px; }
.eyebrow, .soft, caption { color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 18px;
  margin: 12px 0; }
.card h3 { margin: 0 0 6px; font-size: 16px; } ul { margin: 4px 0 8px; padding-left: 20px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 20px; }
figure { margin: 0; } figcaption { font-weight: 600; margin-bottom: 4px; }
.legend { color: var(--soft); font-size: 13px; }
svg { width: 100%; max-width: 640px; height: auto; display: block; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.axis { stroke: var(--line); } .fit { fill: none; stroke: var(--soft); stroke-dasharray: 5 4; stroke-width: 1.5; }
.s0 { fill: var(--one); } .s1 { fill: var(--two); } .tick { stroke: var(--one); stroke-width: 1.5; opacity: .75; }
.scroll { overflow-x: auto; margin-top: 14px; } table { border-collapse: collapse; font-size: 14px; min-width: 100%; }
caption { text-align: left; padding-bottom: 4px; }
td { min-width: 7ch; } td:last-child:not(.n) { min-width: 26ch; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
"""


def page(report: Report) -> str:
    """The whole document. Everything that came from a server is escaped."""
    label = {"measured": "measured", "simulated": "simulated", "recorded": "from a recording"}[report.source]
    sections = [
        f'<div class="eyebrow">labkit diagnose · {label}</div><h1>{escape(_title(report.verdict))}</h1>'
        f'<div class="soft">{escape(report.where)}{" · " + escape(report.who) if report.who else ""}</div>',
        "".join(map(_card, report.findings)),
        f"<h2>What was seen</h2><div class='grid'>{''.join(pictures(report))}</div>",
        _table(report.figures(), "The figures that the verdict stands on"),
        _table(report.percentiles(), "By probe"),
    ]
    fall = report.waterfall()
    if fall is not None:
        sections.append(f"<h2>One request, by both clocks</h2><p>{escape(fall.sentence)}</p>{waterfall_chart(report)}")
        sections.append(_table(fall.rows(), "The same as a table"))
    table = report.conventions()
    if table and report.longest is not None:
        sections.append(f"<h2>What other tools would call it</h2><p>{escape(conventions.spread(report.longest))}</p>")
        sections.append(_table(table, "One stream, by each tool's own definition"))
    notes = [*report.notes, *([report.load] if report.load else [])]
    sections.append("".join(f'<p class="soft">{escape(note)}</p>' for note in notes))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.verdict.cause)}: {escape(report.where)}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(sections)}</main></body></html>"
    )


def _title(finding: Finding) -> str:
    return f"{finding.symptom.capitalize()}: {finding.title}"


def _card(finding: Finding) -> str:
    evidence = "".join(f"<li>{escape(line)}</li>" for line in finding.evidence)
    steps = "".join(f"<li>{escape(line)}</li>" for line in finding.remedies)
    return (
        f'<section class="card"><h3>{escape(_title(finding))}</h3>'
        f'<div class="soft">confidence {finding.confidence:.0%}</div><ul>{evidence}</ul>'
        f"<b>What would move it</b><ul>{steps}</ul></section>"
    )


def pictures(report: Report) -> list[str]:
    """What was seen, one SVG figure each, without the verdict. Colours are the page's (classes s0, s1, fit, ...)."""
    found, seen = [], report.measured
    lengths = [s for s in report.streams if s.tokens and s.recording.meta.get("probe") == "length"]
    if lengths and seen.prefill:
        dots = [(n_fresh(s), (s.ttft_s or 0.0) * 1e3) for s in lengths]
        reach = max(x for x, _ in dots)
        line = [(0.0, max(0.0, seen.prefill.at(0)) * 1e3), (reach, max(0.0, seen.prefill.at(reach)) * 1e3)]
        again = [(n_prompt(s), (s.ttft_s or 0.0) * 1e3) for s in report.streams if s.tokens and _came_again(s)]
        series = [("a fresh prompt", dots), ("one that came again", again)] if again else [("", dots)]
        found.append(_figure("Slow to start?", charts.xy(series, x="prompt tokens", y="TTFT, ms", lines=[line])))
        paced = [(n_prompt(s) + len(s.tokens) / 2, s.tpot_s * 1e3) for s in lengths if s.tpot_s is not None]
        found.append(_figure("Slow to stream?", charts.xy([("", paced)], x="context, tokens", y="ms a token")))
    if seen.loads:
        ttft = [(1.0, (seen.ttft_s or 0.0) * 1e3), *((float(each.n), each.ttft_s * 1e3) for each in seen.loads)]
        worst = [(float(each.n), each.worst_ttft_s * 1e3) for each in seen.loads]
        found.append(
            _figure(
                "Waiting for others?", charts.xy([("mean", ttft), ("worst", worst)], x="requests at once", y="TTFT, ms")
            )
        )
    longest = report.longest
    if longest is not None and longest.recording.timed:
        chart = charts.ticks([at_s * 1e3 for at_s, _ in longest.chunks], longest.recording.end_s * 1e3)
        found.append(_figure("When the events of the longest answer came", chart))
    return found


def _came_again(stream: Stream) -> bool:
    return stream.recording.meta.get("probe") == "repeat" and bool(stream.recording.meta.get("nth"))


def waterfall_chart(report: Report) -> str:
    """One request by both clocks; "" when none was timed."""
    fall = report.waterfall()
    return charts.bars([(b.who, b.what, b.start_s * 1e3, b.end_s * 1e3) for b in fall.bars]) if fall else ""


def _figure(caption: str, chart: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{chart}</figure>" if chart else ""


def _table(rows: Sequence[Mapping[str, Any]], caption: str) -> str:
    if not rows:
        return ""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f'<th scope="col"{_kind(rows, c)}>{escape(c)}</th>' for c in columns)
    body = "".join(
        "<tr>" + "".join(f"<td{_kind(rows, c)}>{escape(_text(row.get(c)))}</td>" for c in columns) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}"
        f"</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _kind(rows: Sequence[Mapping[str, Any]], column: str) -> str:
    return ' class="n"' if all(isinstance(row.get(column), int | float | None) for row in rows) else ""


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
