"""The last runs side by side: what they have in common once, what differs by name, times on one scale."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from labkit.perf.trace import Trace
from labkit.run import Completion
from labkit.ui import html
from labkit.ui.phase_bars import duration, phase_words
from labkit.ui.theme import css_background, phase_look
from labkit.ui.words import say

MAX_RUNS = 6


@dataclass(frozen=True)
class RunRecord:
    """One finished run and the switches it ran with, in words."""

    name: str
    words: dict[str, str]
    completion: Completion

    @property
    def trace(self) -> Trace:
        return self.completion.trace


class RunHistory:
    """Keeps the last six runs; ``html()`` is the table of them."""

    def __init__(self) -> None:
        self.records: list[RunRecord] = []
        self._n_runs = 0

    def add(self, words: dict[str, str], completion: Completion) -> RunRecord:
        record = RunRecord(letter(self._n_runs), words, completion)
        self._n_runs += 1
        self.records = [*self.records, record][-MAX_RUNS:]
        return record

    def clear(self) -> None:
        self.records, self._n_runs = [], 0

    @property
    def differing(self) -> list[str]:
        """The switches that are not the same in all the runs kept."""
        names = dict.fromkeys(name for record in self.records for name in record.words)
        return [name for name in names if len({record.words.get(name) for record in self.records}) > 1]

    def html(self) -> str:
        """One row a run, newest first; bars share one scale, so lengths compare."""
        if not self.records:
            return ""
        scale_ms = max(max(_ttft_ms(r.trace), 1e-9) for r in self.records)
        token_ms = max(max(_token_ms(r.trace), 1e-9) for r in self.records)
        rows = "".join(self._row(record, scale_ms, token_ms) for record in reversed(self.records))
        differing = self.differing
        if len(self.records) == 1:
            note = say("Change a switch and run again: the next run appears beside this one.")
        elif differing:
            note = say("What differs: {names}. Everything else is the same.", names=", ".join(map(say, differing)))
        else:
            note = say("Nothing differs: the spread between these rows is this machine's noise.")
        titles = ("run", "what differs", "TTFT", "time per token", "p95", "tok/s", "memory", "text")
        numeric = {"p95", "tok/s", "memory"}
        head = "".join(
            f'<th scope="col"{" class=is-number" if title in numeric else ""}>{say(title)}</th>' for title in titles
        )
        return (
            f'<div class="lk-history"><div class="lk-stage-name">{say("Side by side")}</div>'
            f'<div class="lk-scroll" tabindex="0" role="group" aria-label="{say("the last runs side by side")}">'
            f'<table class="lk-table"><caption>{html.prose(note)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></div>"
        )

    def _row(self, record: RunRecord, ttft_scale_ms: float, token_scale_ms: float) -> str:
        figures, meta = record.trace.summary(), record.trace.meta
        differing = self.differing
        chips = "".join(
            f'<span class="lk-chip">{escape(say(name))} <b>{escape(record.words.get(name, "–"))}</b></span>'
            for name in differing
        )
        chips = chips or '<span class="lk-muted">–</span>'
        n_decode = max(1, sum(step.stage == "decode" for step in record.trace.steps))
        prefill = record.trace.stage_phases("prefill")
        decode = {k: v / n_decode for k, v in record.trace.stage_phases("decode").items()}
        memory = (meta.get("weights_bytes") or 0) + (meta.get("kv_cache_bytes") or 0)
        return (
            f'<tr><th scope="row">{escape(record.name)}</th><td>{chips}</td>'
            f"<td>{_bar(prefill, figures['ttft_ms'], ttft_scale_ms)}</td>"
            f"<td>{_bar(decode, figures['itl_median_ms'], token_scale_ms)}</td>"
            f'<td class="is-number">{_ms(figures["itl_p95_ms"])}</td>'
            f'<td class="is-number">{html.number(figures["decode_tok_s"])}</td>'
            f'<td class="is-number">{html.size(memory)}</td><td>{escape(self._same_text(record))}</td></tr>'
        )

    def _same_text(self, record: RunRecord) -> str:
        """Whether an earlier run chose the same tokens: what "lossless" means."""
        if record.completion.finish_reason == "cancelled":
            return say("stopped")
        for other in self.records[: self.records.index(record)]:
            if other.completion.token_ids == record.completion.token_ids:
                return say("same as {run}", run=other.name)
        return say("its own") if self.records.index(record) else "–"


def letter(idx: int) -> str:
    """A, B, ... Z, A2, B2 ...

    >>> letter(0), letter(27)
    ('A', 'B2')
    """
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[idx % 26] + (str(idx // 26 + 1) if idx >= 26 else "")


def _ttft_ms(trace: Trace) -> float:
    return trace.summary()["ttft_ms"] or 0.0


def _token_ms(trace: Trace) -> float:
    return trace.summary()["itl_median_ms"] or 0.0


def _ms(value: float | None) -> str:
    return "–" if value is None else duration(value / 1e3)


def _bar(phases: dict[str, float], value_ms: float | None, scale_ms: float) -> str:
    """A small stacked bar, as long as its time on the shared scale, with the figure beside it."""
    if value_ms is None:
        return '<span class="lk-muted">–</span>'
    total = sum(phases.values()) or 1.0
    pieces = "".join(
        f'<i style="flex:{seconds / total:.4f};background:{css_background(phase_look(name))}" '
        f'title="{escape(phase_words(name))}: {escape(duration(seconds))}"></i>'
        for name, seconds in phases.items()
    )
    width = max(2.0, 100 * value_ms / scale_ms)
    return (
        f'<div class="lk-mini"><span class="lk-mini-track"><span style="width:{width:.1f}%">{pieces}</span></span>'
        f"<b>{escape(duration(value_ms / 1e3))}</b></div>"
    )
