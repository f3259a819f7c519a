"""Lesson 00, start here: the exercise, the request that decode's ceiling says nothing about, and the quiz."""

from __future__ import annotations

from typing import Any

from labkit.perf.machine import Machine, Rate, sheet
from labkit.prompts import ready_prompts
from labkit.ui.exercise import Exercise
from labkit.ui.words import say


def waiting_rows(lab: Any) -> list[dict[str, Any]]:
    """Two requests, measured: a short question with a longer answer, a long text with an answer of two tokens."""
    longest = max(ready_prompts(), key=lambda prompt: len(prompt.text)).text
    requests = {
        "short question, 32 new tokens": ("Once upon a time", 32),
        "long text, 2 new tokens": (longest, 2),
    }
    rows = []
    for name, (prompt, n_new) in requests.items():
        trace = lab.pipeline().generate(prompt, max_new_tokens=n_new, ignore_eos=True).trace
        rows.append(
            {
                "request": say(name),
                "prompt tokens": trace.n_prompt_tokens,
                "first token after, ms": trace.ttft_s * 1e3,
                "whole wait, ms": trace.wall_s * 1e3,
                "before the first token": f"{trace.ttft_s / trace.wall_s:.0%}",
            }
        )
    return rows


def _ceiling(bandwidth_gb_s: float, weights_mb: float) -> float:
    """By labkit's own roofline: what one token's FLOPs can reach, over those FLOPs."""
    flops = 1.0
    machine = Machine(
        **{**vars(sheet("T4")), "read": Rate.exactly(bandwidth_gb_s * 1e9), "matmul": {"fp32": Rate.exactly(1e30)}}
    )
    return machine.attainable_flops(flops / (weights_mb * 1e6), "fp32") / flops


CEILING = Exercise(
    "the ceiling of decode",
    cases=[(20.0, 538.0), (50.0, 269.0), (4800.0, 13_480.0), (1.0, 1.0)],
    oracle=_ceiling,
    same=lambda found, expected: abs(found - expected) <= 1e-6 * expected,
    hints=(
        "How long does it take to read the weights once? That is the least time that a token can take.",
        "Mind the units: a gigabyte here is 10^9 bytes, a megabyte 10^6.",
        "`bandwidth_gb_s * 1e9` bytes a second, divided by `weights_mb * 1e6` bytes a token.",
    ),
)

QUIZ = (
    (
        "You double the length of your prompt. Which figure grows for certain?",
        {
            "TTFT": "Yes. The prefill has twice the tokens to work through before the first one can come.",
            "Tokens per second": "No. Decode goes on one token at a time; it slows a little at most.",
            "The memory of the weights": "No. The weights are the same for every prompt; only the cache grows.",
        },
        "TTFT",
    ),
    (
        "Why is there a pause before the first word?",
        {
            "The model is still loading": "It was loaded before. The pause comes back with every prompt.",
            "The prompt goes through all layers first": "Yes: tokenize, prefill, then the first sample. That is TTFT.",
            "The first word is harder to find": "No. Every token costs such a step; the prompt is the difference.",
        },
        "The prompt goes through all layers first",
    ),
    (
        "What limits how fast a single answer can be written?",
        {
            "How fast the weights can be read from memory": "Yes: all of them, once for each token.",
            "The number of words in the vocabulary": "It sets the size of the lm head, one segment among several.",
        },
        "How fast the weights can be read from memory",
    ),
)
