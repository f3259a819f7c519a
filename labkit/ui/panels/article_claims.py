"""The article's figures about prefill, decode and memory, recomputed: each with the caveat that belongs to it."""

from __future__ import annotations

from typing import Any

from labkit.model.config import DenseFFN, GroupedAttention, ModelConfig, Rope, uniform
from labkit.perf.cost import decode_cost
from labkit.perf.formats import cache_nbytes
from labkit.perf.machine import sheet
from labkit.perf.memory import weights_nbytes
from labkit.ui.words import say


def llama(n_layers: int, d_model: int, n_heads: int, d_ff: int) -> ModelConfig:
    """A first-generation Llama: every query head has its own keys, the head is not tied."""
    attention = GroupedAttention(n_heads, n_heads, d_model // n_heads, rope=Rope())
    return ModelConfig(
        "llama", 32_000, d_model, 4096, uniform(n_layers, attention, DenseFFN(d_ff)), tied_embeddings=False
    )


LLAMA_7B = llama(32, 4096, 32, 11_008)
LLAMA_13B = llama(40, 5120, 40, 13_824)


def recomputation_ratio(n_prompt: int, n_new: int) -> float:
    """FLOPs of the linear layers without a cache, over those with one: n (p + n/2) / (p + n)."""
    return n_new * (n_prompt + n_new / 2) / (n_prompt + n_new)


def batch_for_mfu(gpu: str, mfu: float, *, dtype: str = "fp16") -> float:
    """Sequences that must share the weights before a decode step can reach this MFU, the cache not counted."""
    step = decode_cost(LLAMA_7B, 0, dtype=dtype).total
    return mfu * sheet(gpu).ridge(dtype) / (step.flops / step.weight_bytes)


def claims(our_config: ModelConfig) -> list[dict[str, Any]]:
    """One row a claim: what the article says, what it is exactly, and when it does not hold."""
    per_token = cache_nbytes(LLAMA_13B, n_tokens=1, dtype="fp16")
    ours = cache_nbytes(our_config, n_tokens=1, dtype="fp16")
    sizes = [
        weights_nbytes(LLAMA_7B, dtype=dtype, weights=weights) / 1e9
        for dtype, weights in (("fp32", None), ("fp16", None), ("fp16", "int8"), ("fp16", "int4"))
    ]
    thirteen = {"n": per_token, "kib": per_token / 1024, "gb": per_token * 4096 / 1e9}
    gpus = {"a100": "A100-80GB", "h200": "H200"}
    ceiling = {name: 100 / sheet(gpu).ridge("fp16") for name, gpu in gpus.items()}
    needed = {name: batch_for_mfu(gpu, 0.3) for name, gpu in gpus.items()}
    return [
        {
            "claim": say("the cache saves 5x or more"),
            "recomputed": say("{n:.0f}x fewer FLOPs over 300 tokens", n=recomputation_ratio(0, 300)),
            "caveat": say("A ratio of FLOPs. The wall clock depends: a small model on a big GPU may gain nothing."),
        },
        {
            "claim": say("a 13B cache is about 1 MB (800 KiB) a token, 4 GB at 4K"),
            "recomputed": say("{n:,} B = {kib:.0f} KiB; {gb:.2f} GB at 4,096", **thirteen),
            "caveat": say("Only without shared key heads. The model on this page takes {n:,} B a token.", n=ours),
        },
        {
            "claim": say("7B weights: 28 / 14 / 7 / 3.5 GB"),
            "recomputed": " / ".join(f"{size:.2f}" for size in sizes) + " GB",
            "caveat": say(
                "6.74 billion, not 7; labkit's int8 and int4 hold scales too, and int4 keeps the head in int8."
            ),
        },
        {
            "claim": say("decode runs at 30 % utilisation"),
            "recomputed": say("MFU at batch 1 is at most {a100:.2f} % (A100), {h200:.2f} % (H200)", **ceiling),
            "caveat": say(
                "30 % MFU takes a batch of {a100:.0f} (A100) or {h200:.0f} (H200): name the metric.", **needed
            ),
        },
    ]
