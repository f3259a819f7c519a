"""Lesson 06, the KV cache: switched on in the middle of a run, its price in bytes, and what is reserved in vain."""

from __future__ import annotations

from statistics import median
from typing import Any

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from labkit import registry
from labkit.kvcache import Entry, LayerEntries
from labkit.kvcache.contiguous import ContiguousCache
from labkit.perf.formats import cache_nbytes
from labkit.prompts import ready_prompts
from labkit.ui import controls, theme
from labkit.ui.controls import choice, slider
from labkit.ui.errors import guarded
from labkit.ui.exercise import Exercise
from labkit.ui.experiment import Experiment, Result
from labkit.ui.panels.article_claims import LLAMA_13B, recomputation_ratio

ON, OFF = "contiguous", "none"


# --- the cache, switched on in the middle of a run


def measure_toggle(lab: Any, job: Any, panel: Any, *, prompt: str, n_tokens: int, switch_at: int) -> Result:
    """One run that starts without a cache and gets one at a given token; the reader may switch it too, at any time."""
    run = lab.pipeline(kv_cache=OFF, backend="reference").run(prompt, max_new_tokens=n_tokens, ignore_eos=True)
    panel.run_handle, switched, drawn = run, False, 2
    try:
        while run.running:
            live = run.snapshot()
            if not switched and live.n_tokens >= switch_at and live.meta.get("kv_caches"):
                switched = True
                if live.meta["kv_cache"] == OFF:
                    run.use_cache(ON)
            job.progress(min(1.0, live.n_tokens / n_tokens), f"token {live.n_tokens} of {n_tokens}")
            if live.n_tokens > drawn:
                drawn = live.n_tokens
                job.show(_toggle_result(lab, live))
            job.stop_event.wait(0.1)
    finally:
        run.stop()
        panel.run_handle = None
    done = run.result(timeout=60)
    result = _toggle_result(lab, done.trace)
    result.data |= {"token_ids": done.token_ids, "text": done.text}
    return result


def cache_in_use(trace: Any) -> list[str]:
    """Which cache made each token."""
    used = trace.meta["kv_caches"]
    return [next(u["name"] for u in reversed(used) if u["from_token"] <= i) for i in range(trace.n_tokens)]


def bytes_held(trace: Any, a_token: int) -> list[int]:
    """Bytes of keys and values that were kept after each token: the last token's own come with the next step."""
    return [0 if name == OFF else a_token * (trace.n_prompt_tokens + i) for i, name in enumerate(cache_in_use(trace))]


def _toggle_result(lab: Any, trace: Any) -> Result:
    config, dtype = lab.model.config, lab.model.dtype
    a_token = cache_nbytes(config, n_tokens=1, dtype=dtype)
    times_ms = [s * 1e3 for s in trace.itl_s]
    used, held = cache_in_use(trace)[1:], bytes_held(trace, a_token)[1:]
    numbers = list(range(2, 2 + len(times_ms)))
    figure = make_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.08)
    for idx, (name, label) in enumerate(((OFF, "without a cache"), (ON, "with the cache"))):
        mine = [i for i, kind in enumerate(used) if kind == name]
        if mine:
            dots = go.Scatter(
                x=[numbers[i] for i in mine],
                y=[times_ms[i] for i in mine],
                name=label,
                mode="markers",
                **theme.series(idx),
            )
            figure.add_trace(dots, 1, 1)
    memory = go.Scatter(x=numbers, y=[b / 1e6 for b in held], name="keys and values kept", **theme.series(2))
    figure.add_trace(memory, 2, 1)
    theme.figure_layout(figure, x="new token", y="")
    look = {name: figure.layout.xaxis[name] for name in ("gridcolor", "linecolor", "zerolinecolor", "ticks")}  # type: ignore[attr-defined]
    figure.update_xaxes(**look, automargin=True, title_standoff=12)
    figure.update_yaxes(**look, automargin=True, title_standoff=12)
    figure.update_xaxes(title_text="", row=1, col=1)
    figure.update_yaxes(title_text="ms a token", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="MB kept", rangemode="tozero", row=2, col=1)
    figure.update_layout(height=430)
    for switch in trace.meta["kv_caches"][1:]:
        words, at = "cache on" if switch["name"] == ON else "cache off", switch["from_token"] + 1
        line = {"color": theme.VERMILION, "dash": "dot"}
        figure.add_shape(type="line", x0=at, x1=at, y0=0, y1=1, xref="x", yref="paper", line=line)
        figure.add_annotation(x=at, y=1, yref="paper", text=words, showarrow=False, xanchor="left", yanchor="top")
    medians = {name: median(ms) for name in (OFF, ON) if (ms := _settled(times_ms, used, name))}
    rows = [
        {"new token": n, "cache": kind, "ms": ms, "bytes kept": kept}
        for n, kind, ms, kept in list(zip(numbers, used, times_ms, held, strict=True))[:: max(1, len(numbers) // 12)]
    ]
    summary = ""
    if len(medians) == 2:
        summary = (
            f"A token took {medians[OFF]:.0f} ms without the cache and {medians[ON]:.0f} ms with it, "
            f"**{medians[OFF] / medians[ON]:.1f} times** less; memory grew by {a_token:,} bytes with each."
        )
    data = {"used": cache_in_use(trace), "times_ms": times_ms, "held": held, "bytes_a_token": a_token}
    data |= {"switches": trace.meta["kv_caches"], "medians_ms": medians, "n_prompt": trace.n_prompt_tokens}
    return Result(figure, rows, summary, "Some of the tokens", data=data)


def _settled(times_ms: list[float], used: list[str], name: str) -> list[float]:
    """Times under one cache; the token that fills a new cache goes through everything once more and is left out."""
    return [ms for i, ms in enumerate(times_ms) if used[i] == name and (i == 0 or used[i - 1] == name)]


class TogglePanel(Experiment):
    """The experiment, and one more button that works while it runs."""

    def __init__(self, lab: Any, guess: Any = None) -> None:
        def run(job: Any, **values: Any) -> Result:
            return measure_toggle(lab, job, self, **values)

        prompts = [(p.title, p.text) for p in ready_prompts() if not p.chat]
        story = next(p.text for p in ready_prompts() if p.name == "story")
        fields = {
            "prompt": choice("Prompt", prompts, story, width="240px"),
            "n_tokens": slider("New tokens", 16, 160, 32, step=8),
            "switch_at": slider("Cache on after token", 4, 80, 12, step=4),
        }
        super().__init__(
            "What changes when the cache comes on in the middle of a run?",
            run,
            fields,
            guess=guess,
            note="The run starts without a cache. The button switches it while it runs, as often as you like.",
        )
        self.run_handle: Any = None
        self.switch_button = controls.button("Switch the cache now", guarded(self.error, self.switch))
        self.widget.children = (
            *self.widget.children[:-3],
            controls.row(self.switch_button),
            *self.widget.children[-3:],
        )

    def switch(self) -> None:
        """Give the run under way the other cache, from its next token on."""
        run = self.run_handle
        if run is None or not run.running:
            self.status.set("idle", "Press Run first: there is nothing to switch yet.")
            return
        run.use_cache(OFF if run.snapshot().meta.get("kv_cache") == ON else ON)


def panel(lab: Any, guess: Any = None) -> TogglePanel:
    return TogglePanel(lab, guess)


# --- how much faster, by length


def speedups(lab: Any, *, prompt: str, n_tokens: int) -> list[dict[str, Any]]:
    """Two real runs; after each number of tokens, the ratio of the time and of the arithmetic so far."""
    runs = {
        kind: lab.pipeline(kv_cache=kind, backend="reference").generate(
            prompt, max_new_tokens=n_tokens, ignore_eos=True
        )
        for kind in (ON, OFF)
    }
    n_prompt = runs[ON].trace.n_prompt_tokens
    slow, fast = (runs[kind].trace.token_s for kind in (OFF, ON))
    marks = sorted({n for n in (2, 4, 8, 16, 32, 64, 128) if n < n_tokens} | {n_tokens})
    return [
        {
            "new tokens": n,
            "without, s": slow[n - 1],
            "with, s": fast[n - 1],
            "times faster (measured)": slow[n - 1] / fast[n - 1],
            "times less arithmetic (counted)": recomputation_ratio(n_prompt, n),
        }
        for n in marks
    ]


# --- bytes


def shapes(lab: Any) -> list[dict[str, Any]]:
    """Bytes a token, in 16 bits, from the shapes alone: ours, and those that articles quote."""
    ours = lab.model.config
    models = [
        ("this model, SmolLM2-135M", ours.n_layers, ours.n_kv_heads, ours.d_head),
        ("Llama-13B: 40 of 40 heads keep keys", LLAMA_13B.n_layers, LLAMA_13B.n_kv_heads, LLAMA_13B.d_head),
        ("Llama-3-8B: 8 of 32 heads keep keys", 32, 8, 128),
    ]
    rows = []
    for name, n_layers, n_kv_heads, d_head in models:
        layer = LayerEntries((Entry("k", (n_kv_heads, d_head)), Entry("v", (n_kv_heads, d_head))))
        a_token = ContiguousCache.predict_nbytes([layer] * n_layers, capacity_tokens=1, dtype=torch.float16)
        rows.append(
            {
                "model": name,
                "bytes a token": a_token,
                "KiB a token": a_token / 1024,
                "GB at 4,096": a_token * 4096 / 1e9,
                "GiB at 4,096": a_token * 4096 / 2**30,
            }
        )
    return rows


def reservations(
    lab: Any, lengths: tuple[int, ...] = (120, 40, 300, 75), *, longest: int = 1024
) -> list[dict[str, Any]]:
    """The same answers in two caches that exist: what each sets aside, and how much of it holds a token."""
    layers, dtype = lab.model.transformer.cache_entries, lab.model.dtype
    rows = []
    for kind in ("contiguous", "paged"):
        component, config = registry.find("kv_cache", kind)
        cache = component.build(config, layers=layers, capacity_tokens=longest, n_sequences=len(lengths), dtype=dtype)
        cache.begin(dict(enumerate(lengths)))
        cache.commit()
        usage = cache.usage()
        rows.append(
            {
                "KV cache": kind,
                "tokens": usage.n_tokens,
                "set aside, bytes": usage.reserved_bytes,
                "holding tokens, bytes": usage.held_bytes,
                "wasted": usage.waste,
            }
        )
    return rows


# --- the exercise


def _nbytes(n_layers: int, n_kv_heads: int, d_head: int, n_tokens: int, itemsize: int) -> int:
    """labkit's own prediction."""
    layer = LayerEntries((Entry("k", (n_kv_heads, d_head)), Entry("v", (n_kv_heads, d_head))))
    dtype = {2: torch.float16, 4: torch.float32}[itemsize]
    return ContiguousCache.predict_nbytes([layer] * n_layers, capacity_tokens=n_tokens, dtype=dtype)


CACHE_BYTES = Exercise(
    "bytes of a KV cache",
    cases=[(30, 3, 64, 1, 4), (40, 40, 128, 4096, 2), (32, 8, 128, 8192, 2), (1, 1, 1, 1, 2)],
    oracle=_nbytes,
    hints=(
        "Count the numbers first: what does one layer keep for one token?",
        "A key and a value, each `n_kv_heads * d_head` numbers: query heads keep nothing.",
        "2 * n_layers * n_kv_heads * d_head numbers a token, `itemsize` bytes each, `n_tokens` tokens.",
    ),
)

QUIZ = (
    (
        "Why are the queries of earlier tokens not kept?",
        {
            "They are recomputed when needed": "They are never needed again: a query asks once, when its token is new.",
            "No later token reads them": "Right: a new token compares *its* query with all keys, and mixes all values.",
        },
        "No later token reads them",
    ),
    (
        "The step right after the cache came on was as slow as those before. Why?",
        {
            "The cache was empty": "Right: that one step computed keys and values of the whole text and kept them.",
            "Allocating memory is slow": "That takes microseconds. The step went over the whole text, to fill it.",
        },
        "The cache was empty",
    ),
    (
        "With the cache on, does the time per token stay flat for ever?",
        {
            "Yes": "Nearly, here. But each step reads every key and value kept so far: that term grows with the text.",
            "No, attention still grows": "Right, slowly: it reads the cache once a token. Lesson 08 makes it smaller.",
        },
        "No, attention still grows",
    ),
)
