"""Lesson 06, the KV cache: what it gains by length, its price in bytes, and what is reserved in vain."""

from __future__ import annotations

from typing import Any

import torch

from labkit import registry
from labkit.kvcache import Entry, LayerEntries
from labkit.kvcache.contiguous import ContiguousCache
from labkit.ui.exercise import Exercise
from labkit.ui.panels.article_claims import LLAMA_13B, recomputation_ratio
from labkit.ui.panels.cache_toggle import OFF, ON, TogglePanel


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
