"""Lesson 08, shrinking the cache: how many users fit, and where the quality goes."""

from __future__ import annotations

from pydoc_data import topics
from typing import Any

import plotly.graph_objects as go
import torch

from labkit.kvcache import Entry, Int4, Int8, LayerEntries, Paged, Sliding
from labkit.kvcache.contiguous import ContiguousCache
from labkit.kvcache.grid import encode, make_grid
from labkit.kvcache.paged import PagedCache
from labkit.kvcache.quality import measure_quality
from labkit.kvcache.quantized_kinds import Int4Cache, Int8Cache
from labkit.kvcache.sliding import SlidingCache
from labkit.model.attention import entries_of
from labkit.model.config import GroupedAttention, LatentAttention, Rope
from labkit.ui import theme
from labkit.ui.controls import choice, slider
from labkit.ui.exercise import Exercise
from labkit.ui.experiment import Experiment, Result

N_LAYERS, N_HEADS, D_HEAD = 40, 40, 128
"""The shape of a 13B model of 2023: every head keeps keys and values of its own."""
MLA = LatentAttention(N_HEADS, D_HEAD, 64, D_HEAD, 512, rope=Rope())
"""Multi-head latent attention in that shape: 512 numbers for all keys and values, 64 for the position (arXiv
2405.04434)."""


# --- how many users fit


def _layers(n_kv_heads: int) -> list[LayerEntries]:
    return [entries_of(GroupedAttention(N_HEADS, n_kv_heads, D_HEAD))] * N_LAYERS


def one_user(n_tokens: int) -> dict[str, int]:
    """Bytes for one user of ``n_tokens`` in a 13B shape, for each way to keep less. Exact: what would be allocated."""
    size: dict[str, Any] = {"capacity_tokens": n_tokens, "dtype": torch.float16}
    all_heads, grouped = _layers(N_HEADS), _layers(8)
    latent = [entries_of(MLA)] * N_LAYERS
    return {
        "MHA: every head": ContiguousCache.predict_nbytes(all_heads, **size),
        "int8": Int8Cache.predict_nbytes(all_heads, config=Int8(), **size),
        "int4": Int4Cache.predict_nbytes(all_heads, config=Int4(), **size),
        "sliding, 1,024": SlidingCache.predict_nbytes(all_heads, config=Sliding(1024, 4), **size),
        "GQA: 8 of 40 heads": ContiguousCache.predict_nbytes(grouped, **size),
        "GQA, int8": Int8Cache.predict_nbytes(grouped, config=Int8(), **size),
        "GQA, int4": Int4Cache.predict_nbytes(grouped, config=Int4(), **size),
        "MLA: one latent": ContiguousCache.predict_nbytes(latent, **size),
    }


def count_users(job: Any, *, memory_gb: int, n_tokens: int) -> Result:
    """Whole users in a memory that holds nothing but their caches."""
    job.progress(-1, "counting")
    sizes = one_user(n_tokens)
    fit = {name: int(memory_gb * 1e9 // nbytes) for name, nbytes in sizes.items()}
    names = list(fit)
    lossy = [name for name in names if "int" in name or "sliding" in name]
    figure = go.Figure(
        go.Bar(
            y=names,
            x=[fit[name] for name in names],
            orientation="h",
            text=[f"{fit[name]:,}" for name in names],
            textposition="outside",
            cliponaxis=False,
            marker={
                "color": [theme.ORANGE if name in lossy else theme.BLUE for name in names],
                "pattern": {"shape": ["/" if name in lossy else "" for name in names]},
            },
        )
    )
    theme.figure_layout(figure, x="users that fit (striped: lossy)", y="")
    figure.update_layout(height=360, margin={"l": 150, "r": 60})
    figure.update_yaxes(autorange="reversed")
    rows = [
        {"kept": name, "bytes a user": sizes[name], "users": fit[name], "times smaller": sizes[names[0]] / sizes[name]}
        for name in names
    ]
    first, best = names[0], max(names, key=lambda name: fit[name])
    summary = (
        f"In {memory_gb} GB, {fit[first]:,} users of {n_tokens:,} tokens fit with every head's keys, "
        f"{fit[best]:,} with **{best}**."
    )
    return Result(figure, rows, summary, "Bytes from the shapes", data={"sizes": sizes, "users": fit})


def users_panel(guess: Any = None) -> Experiment:
    fields = {
        "memory_gb": slider("Memory for caches, GB", 8, 120, 40, step=8, width="230px"),
        "n_tokens": choice("Tokens a user", [512, 2048, 4096, 16_384, 65_536], 4096),
    }
    return Experiment("How many users fit?", count_users, fields, guess=guess, kind="predicted")


# --- where the quality goes

KINDS: dict[str, Any] = {
    "int8": Int8(),
    "int4, latest 128 in full": Int4(),
    "int4, all of it": Int4(recent=0),
    "sliding 128, 4 sinks": Sliding(128, 4),
    "sliding 128, no sinks": Sliding(128, 0),
}


def manual_text(lab: Any, n_tokens: int) -> list[int]:
    """The first tokens of Python's own manual: English prose that every Python carries."""
    text = "\n".join(topics.topics.values())
    return lab.tokenizer.encode_prompt(text[: 8 * n_tokens])[:n_tokens]


def measure_loss(lab: Any, job: Any, *, n_tokens: int) -> Result:
    """Perplexity and logits of every lossy cache beside the full one's, on the same real text."""
    ids = manual_text(lab, n_tokens)
    found = measure_quality(
        lab.model,
        [ids],
        list(KINDS.values()),
        n_skipped=min(160, n_tokens // 2),
        progress=job.progress,
    )
    names = list(KINDS)
    exact = found[0].lossless_perplexity
    figure = go.Figure(
        go.Bar(
            x=names,
            y=[q.perplexity for q in found],
            text=[f"{q.perplexity:.2f}" for q in found],
            textposition="outside",
            cliponaxis=False,
            marker={"color": theme.ORANGE, "pattern": {"shape": "/"}},
        )
    )
    theme.figure_layout(figure, x="", y="perplexity (lower is better)")
    figure.update_yaxes(rangemode="tozero")
    figure.add_hline(y=exact, line={"color": theme.BLUE, "dash": "dash"})
    # Above the figure: beside the line it would lie on a bar's own number, whichever end it stood at.
    figure.add_annotation(
        text=f"dashed: the full cache, {exact:.2f}",
        x=0,
        y=1.08,
        xref="paper",
        yref="paper",
        xanchor="left",
        showarrow=False,
    )
    full = ContiguousCache.predict_nbytes(
        lab.model.transformer.cache_entries, capacity_tokens=n_tokens, dtype=lab.model.dtype
    )
    rows = [
        {
            "cache": name,
            "perplexity": q.perplexity,
            "change": q.perplexity_change,
            "logit error": q.logit_error,
            "same best token": q.same_token,
            "bytes": q.nbytes,
            "of the full cache": q.nbytes / full,
        }
        for name, q in zip(names, found, strict=True)
    ]
    worst = max(zip(names, found, strict=True), key=lambda pair: pair[1].perplexity)[0]
    summary = (
        f"Over {found[0].n_tokens:,} tokens the full cache has a perplexity of {exact:.2f}. "
        f"{names[0]}: {found[0].perplexity:.2f}. Worst: **{worst}**."
    )
    return Result(figure, rows, summary, "Measured on this machine", data=dict(zip(names, found, strict=True)))


def quality_panel(lab: Any, guess: Any = None) -> Experiment:
    def run(job: Any, **values: Any) -> Result:
        return measure_loss(lab, job, **values)

    fields = {"n_tokens": slider("Tokens of text", 256, 1536, 320, step=64, width="230px")}
    return Experiment("What does each way of keeping less cost in quality?", run, fields, guess=guess)


# --- where it loses


def short_users(n_tokens: int = 96) -> list[dict[str, Any]]:
    """SmolLM2's shape at a length below the recent window: bytes by kind."""
    layers = [LayerEntries((Entry("k", (3, 64)), Entry("v", (3, 64))))] * 30
    size: dict[str, Any] = {"dtype": torch.float16}
    kinds = {
        "contiguous": lambda n: ContiguousCache.predict_nbytes(layers, capacity_tokens=n, **size),
        "int4": lambda n: Int4Cache.predict_nbytes(layers, capacity_tokens=n, config=Int4(), **size),
        "paged": lambda n: PagedCache.predict_nbytes(layers, capacity_tokens=n, config=Paged(), **size),
    }
    return [
        {"KV cache": name, f"bytes at {n_tokens}": count(n_tokens), "bytes at 8,192": count(8192)}
        for name, count in kinds.items()
    ]


# --- the exercise


def _codes(numbers: list[float]) -> list[int]:
    """labkit's own int8 codes of one key channel."""
    x = torch.tensor(numbers)
    scale, zero = make_grid(x.min(), x.max(), "int8")
    return encode(x, scale, zero, "int8").tolist()


CODES = Exercise(
    "numbers to int8",
    cases=[([-127.0, 0.0, 127.0],), ([0.0, 1.0, 2.0, 4.0],), ([10.0, 10.5, 11.0, 12.0],), ([-3.0, 0.25, 8.0],)],
    oracle=_codes,
    same=lambda found, expected: (
        len(found) == len(expected) and all(abs(a - b) <= 1 for a, b in zip(found, expected, strict=True))
    ),
    hints=(
        "The codes run from -127 to 127: the middle of the numbers becomes 0, the furthest one 127 steps away.",
        "`zero = (min(numbers) + max(numbers)) / 2` and `scale = (max(numbers) - zero) / 127`.",
        "`[round((x - zero) / scale) for x in numbers]`",
    ),
)

QUIZ = (
    (
        "Grouped-query attention keeps fewer keys. Can any model be switched to it?",
        {
            "Yes, it is a way to store": "No: which heads share keys is in the weights. It must be trained so.",
            "No, its weights must fit": "Right: GQA and MLA are the model's choice; int8 and eviction are yours.",
        },
        "No, its weights must fit",
    ),
    (
        "Why do keys get one grid per channel, and values one per token?",
        {
            "Some key channels are large in every token": "Right: on a grid of its own such a channel spoils no other.",
            "Keys are longer than values": "They are equally long here. Look at how their sizes differ by channel.",
        },
        "Some key channels are large in every token",
    ),
    (
        "A sliding window without its first four tokens fell apart. What were they for?",
        {
            "They held the beginning of the text": "Their content hardly matters: any first tokens would do.",
            "Attention had to go somewhere": "Right: weights add up to 1; a head with nothing to say puts them there.",
        },
        "Attention had to go somewhere",
    ),
)
