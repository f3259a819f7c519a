"""Lesson 11, the second half: blocks and who shares them, and who waits when a long prompt comes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Any

import ipywidgets as w

from labkit.kvcache import Paged
from labkit.serving import ChunkedPrefill, Continuous, Service
from labkit.serving.figures import waste
from labkit.ui import html, theme

LONG_WORDS = "The committee met on Tuesday and wrote down what it had decided about the harbour. "


# --- blocks, and who shares them


def shared_document(lab: Any, n_repeats: int = 6) -> dict[str, Any]:
    """Three questions on one document, one after the other; the last two find its blocks."""
    document = "".join(f"{n + 1}. {LONG_WORDS}" for n in range(n_repeats))
    rows, grids = [], []
    with Service(lab.model, kv_cache=Paged(n_blocks=64), capacity_tokens=512) as service:
        for question in ("Who met?", "When was it?", "What was it about?"):
            request = service.submit(document + question, max_new_tokens=4, ignore_eos=True)
            request.sequence.ended.wait(120)
            rows.append(
                {
                    "question": question,
                    "prompt tokens": request.sequence.n_prompt,
                    "found stored": request.n_shared,
                    "computed": request.sequence.n_prompt - request.n_shared,
                    "TTFT, ms": request.sequence.token_s[0] * 1e3,
                }
            )
        together = [
            service.submit(document + question, max_new_tokens=40, ignore_eos=True) for question in ("Why?", "Where?")
        ]
        while not all(request.sequence.n_new > 3 or request.sequence.ended.is_set() for request in together):
            together[0].sequence.ended.wait(0.01)
        grids.append(block_owners(service))
        for request in together:
            request.sequence.stop_event.set()
            request.sequence.ended.wait(60)
    return {"rows": rows, "grid": grids[0]}


def block_owners(service: Service) -> list[list[int]]:
    """For each block of the pool, the requests that refer to it now."""
    owners: list[list[int]] = [[] for _ in range(service.engine.cache.n_blocks)]
    for request in list(service.queues.running):
        for block in service.engine.cache.block_ids(request.request_id):
            owners[block].append(request.request_id)
    return owners


def grid_html(owners: list[list[int]], caption: str) -> str:
    """The pool as coloured cells: a letter a request, two letters where it is shared, a dot where it is free."""
    ids = sorted({owner for found in owners for owner in found})
    letters = {request_id: chr(ord("A") + n) for n, request_id in enumerate(ids)}
    cells = []
    for block, found in enumerate(owners):
        name = "".join(letters[owner] for owner in found) or "·"
        color = "transparent" if not found else theme.GREEN if len(found) > 1 else theme.COLORS[ids.index(found[0]) % 8]
        ink = "inherit" if not found else "#16161a"
        cells.append(
            f'<span title="block {block}: {escape(name)}" style="background:{color};color:{ink};border:1px solid '
            f'{theme.NEUTRAL};border-radius:3px;text-align:center;font:600 12px/22px system-ui;">{escape(name)}</span>'
        )
    n_shared = sum(len(found) > 1 for found in owners)
    n_own = sum(len(found) == 1 for found in owners)
    words = (
        f"{escape(caption)}: {n_shared} blocks that both refer to, {n_own} of one request alone, "
        f"{len(owners) - n_shared - n_own} free."
    )
    grid = "display:grid;grid-template-columns:repeat(auto-fill,minmax(26px,1fr));gap:3px;max-width:640px"
    return (
        f'<figure style="margin:0"><figcaption class="lk-muted">{words}</figcaption>'
        f'<div role="img" aria-label="{words}" style="{grid}">{"".join(cells)}</div></figure>'
    )


def show(reserved: list[dict[str, Any]], shared: dict[str, Any]) -> Any:
    """The two tables, and two requests on one document in the pool of blocks as they stood while both were writing."""
    parts = (
        html.table(reserved, "Two ways to keep the same four texts"),
        html.table(shared["rows"], "Three questions on one document, one after the other"),
        grid_html(shared["grid"], "Two answers under way, A and B, on one document"),
    )
    return w.HTML(html.page("".join(f'<div style="margin-bottom:16px">{part}</div>' for part in parts)))


# --- where it loses


def when_a_long_prompt_comes(lab: Any, n_repeats: int = 16, budget: int = 64) -> list[dict[str, Any]]:
    """Somebody is writing when a long prompt arrives: the longest gap between two of the writer's tokens."""
    prompt = LONG_WORDS * n_repeats
    rows = []
    for name, scheduler in (
        ("continuous", Continuous(max_requests=2)),
        (f"chunked-prefill, {budget} tokens a step", ChunkedPrefill(max_requests=2, token_budget=budget)),
        ("chunked-prefill, at most twice as slow", ChunkedPrefill(max_requests=2, max_slowdown=2.0)),
    ):
        with Service(lab.model, scheduler=scheduler, capacity_tokens=1024) as service:
            writer = service.submit("Once upon a time", max_new_tokens=32, ignore_eos=True)
            while writer.sequence.n_new < 8 and not writer.sequence.ended.is_set():
                writer.sequence.ended.wait(0.005)
            late = service.submit(prompt, max_new_tokens=2, ignore_eos=True)
            for request in (writer, late):
                request.sequence.ended.wait(120)
        gaps = sorted(b - a for a, b in pairwise(writer.sequence.token_s))
        rows.append(
            {
                "policy": name,
                "long prompt, tokens": late.sequence.n_prompt,
                "writer's usual gap, ms": gaps[len(gaps) // 2] * 1e3,
                "writer's longest gap, ms": gaps[-1] * 1e3,
                "the newcomer's TTFT, ms": late.sequence.token_s[0] * 1e3,
            }
        )
    return rows


def show_pauses(rows: Sequence[dict[str, Any]]) -> Any:
    """The table and what it says."""
    table = html.table(rows, "A writer's longest pause when a long prompt arrives (measured just now)")
    return w.HTML(html.page(table + f'<div class="lk-note">{html.prose(stalled(rows))}</div>'))


def stalled(rows: Sequence[dict[str, Any]]) -> str:
    """The table in a sentence, whichever way it came out."""
    whole, *chunked = (row["writer's longest gap, ms"] for row in rows)
    best = min(range(len(chunked)), key=lambda i: chunked[i])
    later = rows[best + 1]["the newcomer's TTFT, ms"] / rows[0]["the newcomer's TTFT, ms"]
    if chunked[best] < 0.8 * whole:
        return (
            f"With **{rows[best + 1]['policy']}** the writer's longest pause was {chunked[best]:.0f} ms instead of "
            f"{whole:.0f} ms; the newcomer's own first token took **{later:.1f} times** as long."
        )
    return (
        f"Here the chunks did not shorten the writer's longest pause ({whole:.0f} ms whole, {chunked[best]:.0f} ms in "
        "chunks): something else on this machine was slower than the prompt."
    )


def reserved_in_vain(lab: Any) -> list[dict[str, Any]]:
    """Waste of both ways to store, measured over the steps of the same four requests."""
    rows = []
    for name, cache in (("contiguous", "contiguous"), ("paged, 16 tokens a block", Paged(prefix_sharing=False))):
        with Service(lab.model, scheduler=Continuous(max_requests=4), kv_cache=cache, capacity_tokens=512) as service:
            requests = [service.submit(LONG_WORDS * n, max_new_tokens=6, ignore_eos=True) for n in (1, 2, 3, 4)]
            for request in requests:
                request.sequence.ended.wait(120)
            rows.append({"KV cache": name, "set aside in vain": waste(list(service.moments))})
    return rows
