"""Lesson 06, the cache as a grid that fills: a column a token, a row a layer, one more column with each step."""

from __future__ import annotations

from typing import Any

from labkit.model.config import ModelConfig, dtype_name
from labkit.perf.formats import cache_nbytes
from labkit.ui import html
from labkit.ui.controls import choice, slider
from labkit.ui.experiment import Result
from labkit.ui.live import Live
from labkit.ui.words import counted, say, sentences

NONE, CONTIGUOUS, PAGED, SLIDING = "none", "contiguous", "paged", "sliding"
BLOCK, WINDOW, N_SINKS = 8, 16, 4
MAX_PROMPT, MAX_STEPS = 16, 32
N_COLUMNS = MAX_PROMPT + MAX_STEPS
CELL, GAP = 7, 1


def columns(kind: str, n_prompt: int, n_steps: int, n_asked: int = MAX_STEPS) -> list[str]:
    """What each token's column is after ``n_steps`` steps: "new" (written by the last step), "kept", "gone", "again"
    (computed in this step and thrown away), "free" (set aside, empty) or "" (not there).

    The first step sends the whole prompt; each later one sends the token that the step before it chose.

    >>> columns("contiguous", 2, 2, 3)[:6]
    ['kept', 'kept', 'new', 'free', '', '']
    """
    if not n_steps:
        return ["free" if kind == CONTIGUOUS and at < n_prompt + n_asked - 1 else "" for at in range(N_COLUMNS)]
    held = n_prompt + n_steps - 1
    newest = range(n_prompt) if n_steps == 1 else range(held - 1, held)
    aside = {CONTIGUOUS: n_prompt + n_asked - 1, PAGED: -(-held // BLOCK) * BLOCK}.get(kind, held)
    found = []
    for at in range(N_COLUMNS):
        if at >= held:
            found.append("free" if at < aside else "")
        elif kind == NONE:
            found.append("again")
        elif kind == SLIDING and N_SINKS <= at < held - WINDOW:
            found.append("gone")
        else:
            found.append("new" if at in newest else "kept")
    return found


def draw(config: ModelConfig, dtype: str, *, kind: str, n_prompt: int, n_steps: int) -> Result:
    """The grid after ``n_steps`` steps, and what it costs in bytes by the model's own shapes."""
    a_token = cache_nbytes(config, n_tokens=1, dtype=dtype)
    rows = []
    for step in range(1, max(1, n_steps) + 1):
        found = columns(kind, n_prompt, step if n_steps else 0)
        kept = sum(each in ("kept", "new") for each in found)
        sent = 0 if not n_steps else n_prompt + step - 1 if kind == NONE else n_prompt if step == 1 else 1
        rows.append(
            {
                "step": step if n_steps else 0,
                "tokens through the model": sent,
                "tokens kept": kept,
                "kept, bytes": kept * a_token,
                "set aside, bytes": (kept + found.count("free")) * a_token,
            }
        )
    found, last = columns(kind, n_prompt, n_steps), rows[-1]
    size = {"kept": html.size(last["kept, bytes"]), "aside": html.size(last["set aside, bytes"])}
    if not n_steps:
        said = say("Nothing has run yet: {aside} are set aside.", **size)
    elif kind == NONE:
        n = last["tokens through the model"]
        said = counted(
            n,
            "Step {step} sent {n} token through all layers and kept nothing.",
            "Step {step} sent all {n} tokens through all layers and kept nothing.",
            step=n_steps,
        )
    else:
        sent = counted(
            last["tokens through the model"],
            "Step {step} sent **{n} token** through and wrote a column.",
            "Step {step} sent **{n} tokens** through and wrote a column for each.",
            step=n_steps,
        )
        now = say("{n} tokens are kept, {kept}; set aside are {aside}.", n=last["tokens kept"], **size)
        gone = found.count("gone")
        lost = counted(gone, "{n} token is out of sight for good.", "{n} tokens are out of sight for good.")
        said = sentences(sent, now, lost if gone else "")
    extra = _svg(found, config.n_layers, said.replace("**", "")) + _legend(found)
    return Result(None, rows, said, "The steps so far", extra=extra, data=found)


def _svg(found: list[str], n_layers: int, words: str) -> str:
    height = max(2, 150 // n_layers)
    cells = "".join(
        f'<rect class="is-{state}" x="{at * CELL}" y="{layer * height}" width="{CELL - GAP}" height="{height - GAP}"/>'
        for at, state in enumerate(found)
        if state
        for layer in range(n_layers)
    )
    size = f"{N_COLUMNS * CELL} {n_layers * height}"
    heads = f'<div class="lk-lines-head"><span>{say("tokens →")}</span></div>'
    return (
        f'<div class="lk-cache">{heads}<svg viewBox="0 0 {size}" role="img" aria-label="{words}">{cells}</svg>'
        f'<div class="lk-muted">{say("{n} layers, from the first at the top", n=n_layers)}</div></div>'
    )


_STATES = {
    "new": "written by this step",
    "kept": "kept from before",
    "again": "computed in this step, thrown away",
    "free": "set aside, still empty",
    "gone": "out of the window",
}


def _legend(found: list[str]) -> str:
    keys = "".join(
        f'<span class="lk-key"><svg class="lk-swatch" viewBox="0 0 13 13" aria-hidden="true">'
        f'<rect class="is-{state}" width="13" height="13"/></svg>{say(words)}</span>'
        for state, words in _STATES.items()
        if state in found
    )
    return f'<div class="lk-legend lk-cache">{keys}</div>'


def panel(lab: Any) -> Live:
    """Step by step, with each way of keeping."""
    model = lab.model

    def show(**values: Any) -> Result:
        return draw(model.config, dtype_name(model.dtype), **values)

    kinds = [
        ("nothing is kept", NONE),
        ("one block, reserved", CONTIGUOUS),
        ("pages of 8 tokens", PAGED),
        ("a window of 16, and 4 first tokens", SLIDING),
    ]
    fields = {
        "kind": choice("How it is kept", kinds, CONTIGUOUS, width="260px"),
        "n_prompt": slider("Prompt tokens", 1, MAX_PROMPT, 6, width="200px"),
        "n_steps": slider("Steps so far", 0, MAX_STEPS, 0, width="240px"),
    }
    return Live("The cache fills: a column a token, a row a layer", show, fields)
