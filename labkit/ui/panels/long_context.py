"""Lesson 12, attention redesigned around the cache: what a million tokens cost, and what a compressed cache recalls."""

from __future__ import annotations

from dataclasses import replace
from math import log10
from typing import Any

import plotly.graph_objects as go
import torch

from labkit.checkpoint import recall_toys as toys
from labkit.checkpoint.catalogue import shape
from labkit.model.config import GroupedAttention, ModelConfig, Rope
from labkit.perf import device, formats
from labkit.perf.attention_cost import rows_seen
from labkit.perf.long_context import cache_nbytes, decode_flops, grouped_like
from labkit.ui import theme
from labkit.ui.controls import choice, slider
from labkit.ui.exercise import Exercise
from labkit.ui.experiment import Experiment, Result

LENGTHS = [1 << n for n in range(10, 21)]
MILLION = 1 << 20
V32, PRO, FLASH = "deepseek-v3.2", "deepseek-v4-pro", "deepseek-v4-flash"
WHAT = {"bytes of one user's cache": "cache", "FLOPs of the next token": "work"}


def models() -> dict[str, ModelConfig]:
    """The kinds of attention to compare, in one shape: 61 layers, 128 heads, V3.2's experts (V4-Pro has its own)."""
    v32 = shape(V32)

    def with_attention(attention: Any) -> ModelConfig:
        return replace(v32, layers=tuple(replace(layer, attention=attention) for layer in v32.layers))

    dense = GroupedAttention(128, 128, 128, rope=Rope())
    mla: Any = replace(v32.layers[0].attention, indexer=None)
    return {
        "MHA, 128 heads": with_attention(dense),
        "GQA, 8 of 128": with_attention(replace(dense, n_kv_heads=8)),
        "MLA (V3)": with_attention(mla),
        "V3.2: MLA, chosen": v32,
        "V4-Pro: CSA + HCA": shape(PRO),
    }


# --- a million tokens


def compare(job: Any, *, what: str) -> Result:
    """One curve a kind of attention, from 1K to 1M tokens, both axes logarithmic."""
    is_cache = WHAT[what] == "cache"
    figure, found = go.Figure(), {}
    for idx, (name, config) in enumerate(models().items()):
        job.progress(idx / 5, f"counting {name}")
        found[name] = [cache_nbytes(config, n) if is_cache else sum(decode_flops(config, n).values()) for n in LENGTHS]
        figure.add_scatter(x=LENGTHS, y=found[name], name=name, mode="lines+markers", **theme.series(idx))
    theme.figure_layout(figure, x="tokens in the context", y="bytes" if is_cache else "FLOPs", height=440)
    figure.update_layout(legend={"y": 1.02}, margin={"t": 70})
    figure.update_xaxes(type="log", tickvals=LENGTHS[::2], ticktext=[_tokens(n) for n in LENGTHS[::2]])
    figure.update_yaxes(type="log", exponentformat="SI" if not is_cache else "power")
    own = device.memory_bytes("cuda" if torch.cuda.is_available() else "cpu")
    if is_cache:
        figure.add_hline(y=own, line={"color": theme.GREY, "dash": "dash", "width": 1.5})
        figure.add_annotation(
            text=f"this machine: {own / 2**30:.0f} GiB",
            x=0.01,
            xref="paper",
            xanchor="left",
            y=log10(own),
            yanchor="bottom",
            showarrow=False,
        )
        ticks = [1 << n for n in range(20, 44, 4)]
        figure.update_yaxes(tickvals=ticks, ticktext=[_bytes(n) for n in ticks])
    unit = "GiB" if is_cache else "TFLOP"
    per = 2**30 if is_cache else 1e12
    rows = [
        {"attention": name, **{f"{_tokens(n)}, {unit}": ys[LENGTHS.index(n)] / per for n in LENGTHS[::5]}}
        for name, ys in found.items()
    ]
    last = {name: ys[-1] for name, ys in found.items()}
    v32, pro = last["V3.2: MLA, chosen"], last["V4-Pro: CSA + HCA"]
    if is_cache:
        fits = [name for name, n in last.items() if n <= own]
        summary = (
            f"At a million tokens: V3.2 {v32 / 2**30:.1f} GiB, V4-Pro {pro / 2**30:.2f} GiB, {v32 / pro:.1f} times "
            f"less, both in bf16. In this machine's memory one user of a million tokens would fit with "
            f"{', '.join(fits) if fits else 'none of the five'}."
        )
    else:
        summary = (
            f"At a million tokens the next one takes {v32 / 1e12:.2f} TFLOP in V3.2 and {pro / 1e12:.2f} in V4-Pro: "
            f"{pro / v32:.1%} of it, each FLOP counted alike."
        )
    return Result(figure, rows, summary, "Counted from the shapes", data={"what": what, "last": last, "memory": own})


def curves_panel(guess: Any = None) -> Experiment:
    fields = {"what": choice("What to count", list(WHAT), next(iter(WHAT)), width="280px")}
    return Experiment(
        "What does the context cost, from 1K to 1M tokens?", compare, fields, guess=guess, kind="predicted"
    )


def numbers() -> list[dict[str, Any]]:
    """The published figures, recomputed: which ratio compares what with what."""
    v32, pro, flash = shape(V32), shape(PRO), shape(FLASH)
    low_v32, low_pro, low_flash = (cache_nbytes(c, MILLION, low_precision=True) for c in (v32, pro, flash))
    plain = [sum(decode_flops(c, MILLION).values()) for c in (v32, pro, flash)]
    weighted = [sum(decode_flops(c, MILLION, weighted=True).values()) for c in (v32, pro, flash)]
    v32_bf16, pro_bf16 = cache_nbytes(v32, MILLION), cache_nbytes(pro, MILLION)
    return [
        {"of a million tokens": "V3.2's cache, bf16", "here": f"{v32_bf16 / 2**30:.2f} GiB", "published": "83.9 GiB"},
        {"of a million tokens": "V4-Pro's cache, bf16", "here": f"{pro_bf16 / 2**30:.2f} GiB", "published": "9.62 GiB"},
        {
            "of a million tokens": "smaller, bf16 to bf16",
            "here": f"{v32_bf16 / pro_bf16:.2f}x",
            "published": "8.7x",
        },
        {
            "of a million tokens": "Pro's cache of V3.2's, fp8 and fp4",
            "here": f"{low_pro / low_v32:.1%}, {low_v32 / low_pro:.2f}x",
            "published": "10 %, 9.5x",
        },
        {
            "of a million tokens": "Flash's cache of V3.2's, fp8 and fp4",
            "here": f"{low_flash / low_v32:.1%}, {low_v32 / low_flash:.2f}x",
            "published": "7 %, 13.7x",
        },
        {
            "of a million tokens": "Pro in fp8 and fp4, of GQA-8 in bf16",
            "here": f"{low_pro / (MILLION * grouped_like(pro)):.2%}",
            "published": "about 2 %",
        },
        {
            "of a million tokens": "FLOPs of a token: Pro and Flash of V3.2, each alike",
            "here": f"{plain[1] / plain[0]:.1%} and {plain[2] / plain[0]:.1%}",
            "published": "27 % and 10 %",
        },
        {
            "of a million tokens": "the same weighed by format (inferred)",
            "here": f"{weighted[1] / weighted[0]:.1%} and {weighted[2] / weighted[0]:.1%}",
            "published": "27 % and 10 %",
        },
    ]


# --- recall against compression

LABELS = {"full": "full", "sliding": "window of 8", "mla": "MLA", "csa": "CSA, 4 to a row", "hca": "HCA, 16 to a row"}


def measure_recall(job: Any, *, n_facts: int) -> Result:
    """Every trained toy answers questions about ``n_facts`` facts, through labkit's own cache."""
    figure, rows, data = go.Figure(), [], {}
    for idx, (kind, label) in enumerate(LABELS.items()):
        shares, nbytes = [], int(cache_nbytes(toys.config(kind), toys.N_CONTEXT_TOKENS))
        for seed in toys.seeds(kind):
            job.progress(idx / len(LABELS), f"asking {label}")
            model = toys.load(kind, seed)
            shares.append(toys.recall(model, n_facts, n_sequences=8))
        mean = sum(shares) / len(shares)
        look = theme.series(idx)
        figure.add_scatter(
            x=[nbytes] * len(shares),
            y=shares,
            mode="markers",
            marker=look["marker"] | {"opacity": 0.5},
            showlegend=False,
        )
        figure.add_scatter(
            x=[nbytes],
            y=[mean],
            name=label,
            mode="markers",
            marker=look["marker"] | {"size": 15},
            error_y={"type": "data", "array": [max(shares) - mean], "arrayminus": [mean - min(shares)]},
        )
        rows.append(
            {
                "attention": label,
                "cache bytes": nbytes,
                "recall": mean,
                "lowest": min(shares),
                "highest": max(shares),
                "training runs": len(shares),
            }
        )
        data[kind] = {"nbytes": nbytes, "recall": shares}
    theme.figure_layout(figure, x="bytes of cached rows, bf16", y="share answered rightly", height=420)
    figure.update_layout(legend={"y": 1.02}, margin={"t": 70})
    ticks = [512, 1024, 2048, 4096, 8192, 16_384]
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{n:,}" for n in ticks])
    figure.update_yaxes(range=[0, 1.05], tickformat=".0%")
    figure.add_hline(y=1 / toys.N_VALUES, line={"color": theme.GREY, "dash": "dot", "width": 1.5})
    best = max(rows, key=lambda row: row["recall"])
    worst = min((row for row in rows if row["attention"] != LABELS["sliding"]), key=lambda row: row["recall"])
    luck = max(rows, key=lambda row: row["highest"] - row["lowest"])
    apart = 100 * (luck["highest"] - luck["lowest"])
    summary = (
        f"A toy, with {n_facts} facts in 64 tokens: {best['attention']} answers {best['recall']:.0%} rightly. Of those "
        f"that keep something of every token, {worst['attention']} recalls least, {worst['recall']:.0%}. The dotted "
        "line is guessing; small marks are single training runs, bars reach from the lowest to the highest. Luck in "
        f"training counts most for {luck['attention']}: {luck['training runs']} runs, {apart:.0f} points apart."
    )
    return Result(figure, rows, summary, "Toy models, measured on this machine", data=data | {"n_facts": n_facts})


def recall_panel(guess: Any = None) -> Experiment:
    fields = {"n_facts": slider("Facts to keep apart", 1, 32, 8, step=1, width="260px")}
    return Experiment(
        "A toy: how many facts survive in the rows?",
        measure_recall,
        fields,
        guess=guess,
        note="One-layer models with random facts for a language, trained alike. Not a forecast for a large model.",
    )


# --- where it loses


def short_contexts(lengths: tuple[int, ...] = (32, 128, 1024, 32_768)) -> list[dict[str, Any]]:
    """Bytes that a real cache allocates for short contexts, window, open blocks and room to roll back included."""
    shown = {"GQA, 8 of 128": models()["GQA, 8 of 128"], "V3.2": shape(V32), "V4-Pro": shape(PRO)}
    return [
        {
            "cache, bf16": name,
            **{f"{n:,} tokens, MB": formats.cache_nbytes(config, n_tokens=n, dtype="bf16") / 1e6 for n in lengths},
        }
        for name, config in shown.items()
    ]


# --- the exercise


def _rows_read(n_tokens: int, window: int, rate: int, top_k: int) -> int:
    """labkit's own count: what one query of CSA sees after ``n_tokens``, itself included."""

    def last(rate: int, cap: int) -> int:
        return rows_seen(n_tokens, rate, cap) - rows_seen(n_tokens - 1, rate, cap)

    return last(1, window) + last(rate, top_k)


ROWS = Exercise(
    "rows that a query of CSA reads",
    cases=[(3, 128, 4, 1024), (128, 128, 4, 1024), (5000, 128, 4, 1024), (1 << 20, 128, 4, 1024), (100, 8, 16, 2)],
    oracle=_rows_read,
    hints=(
        "Two kinds of keys are added up: single tokens of the window, and rows of closed blocks.",
        "There are at most `n_tokens` single tokens, and `n_tokens // rate` closed blocks.",
        "`return min(n_tokens, window) + min(n_tokens // rate, top_k)`",
    ),
)

QUIZ = (
    (
        "V4-Pro's cache is “8.7 times smaller” in one article and “10 %” in another. Who is wrong?",
        {
            "One of them": "Both are right. One compares bf16 with bf16, the other fp8 and fp4 with fp8.",
            "Neither": "Right: 8.7 times is bf16 against bf16; 10 % is each in the low precision it is served in.",
        },
        "Neither",
    ),
    (
        "V3.2 lets a query see 2,048 tokens only. Why does a token still cost more after a million?",
        {
            "The indexer scores every past token": "Right: narrow scores, but a million of them in each layer.",
            "2,048 tokens are more than there were": "It sees 2,048 after 10,000 tokens too. What else is computed?",
        },
        "The indexer scores every past token",
    ),
    (
        "A block of CSA is still open. Where are its tokens seen meanwhile?",
        {
            "Nowhere, until it closes": "Then the latest words would be lost. Look at the window.",
            "In the window of latest tokens": "Right: the window is wider than a block, so nothing is unseen.",
        },
        "In the window of latest tokens",
    ),
)


def _tokens(n: int) -> str:
    return "1M" if n == MILLION else f"{n >> 10}K"


def _bytes(n: int) -> str:
    return f"{n >> 40} TiB" if n >> 40 else f"{n >> 30} GiB" if n >> 30 else f"{n >> 20} MiB"
