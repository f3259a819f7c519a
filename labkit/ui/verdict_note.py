"""A finding as a note on the page: the verdict, its evidence, what would move it."""

from __future__ import annotations

from labkit.perf.verdict import Finding
from labkit.ui import html
from labkit.ui.words import say


def finding_note(found: Finding) -> str:
    """HTML; every text is escaped, because a server may have written parts of it."""
    evidence, remedies = (
        "".join(f"<li>{html.prose(line)}</li>" for line in lines)
        for lines in (found.evidence, [step.said(say) for step in found.next_steps])
    )
    return (
        f'<div class="lk-note"><b>{html.prose(found.headline(say))}</b><ul class="lk-goals">{evidence}</ul>'
        f'<div class="lk-muted">{say("What would move it")}</div><ul class="lk-goals">{remedies}</ul></div>'
    )
