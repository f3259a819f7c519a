"""The figures a reader asks for first, as tiles: TTFT, ITL, tokens a second, memory."""

from __future__ import annotations

from typing import Any

from labkit.perf.trace import Trace
from labkit.ui import html
from labkit.ui.phase_bars import duration
from labkit.ui.words import counted, say


def tiles(trace: Trace | None) -> list[dict[str, str]]:
    """Label, value, unit and a note for each tile; dashes before the first run."""
    figures: dict[str, Any] = trace.summary() if trace is not None else {}
    meta: dict[str, Any] = trace.meta if trace is not None else {}
    median = figures.get("itl_median_ms")
    weights, cache = meta.get("weights_bytes"), meta.get("kv_cache_bytes")
    n_prompt, n_tokens = figures.get("n_prompt_tokens"), figures.get("n_tokens")
    total = None if weights is None else weights + (cache or 0)
    size, unit = html.size(total).split(" ") if total is not None else ("–", "")
    return [
        _tile(say("Time to first token"), figures.get("ttft_ms"), "ms", _prompt(n_prompt)),
        _tile(say("Time per token"), median, "ms", _spread(figures)),
        _tile(say("Speed"), figures.get("decode_tok_s"), "tok/s", _answer(n_tokens)),
        {
            "label": say("Memory"),
            "value": size,
            "unit": unit,
            "note": _held(weights, cache),
        },
    ]


def _prompt(n: int | None) -> str:
    return counted(n, "{n:,} prompt token", "{n:,} prompt tokens") if n else "TTFT"


def _answer(n: int | None) -> str:
    return counted(n, "{n:,} token", "{n:,} tokens") if n else say("decode")


def _held(weights: int | None, cache: int | None) -> str:
    if weights is None:
        return say("weights + cache")
    return say("{weights} weights + {cache} cache", weights=html.size(weights), cache=html.size(cache))


def _spread(figures: dict[str, Any]) -> str:
    """What stands under the time per token. With a drafter several come at once: the reader waits for a round."""
    p95, together = figures.get("itl_p95_ms"), figures.get("tokens_per_round") or 1.0
    if together > 1.0:
        every = duration(figures["round_median_ms"] / 1e3)
        return say("{n:.1f} tokens every {every}", n=together, every=every)
    return say("median; p95 {p95}", p95=duration(p95 / 1e3)) if p95 else say("ITL, median")


def _tile(label: str, value: float | None, unit: str, note: str) -> dict[str, str]:
    if unit == "ms" and value is not None and value >= 1000:
        value, unit = value / 1000, "s"
    return {"label": label, "value": html.number(value), "unit": unit if value is not None else "", "note": note}
