"""The article's figures about prefill, decode and memory, recomputed: each with the caveat that belongs to it."""

from __future__ import annotations

from typing import Any

from labkit.model.config import DenseFFN, GroupedAttention, ModelConfig, Rope, uniform
from labkit.perf.cost import decode_cost
from labkit.perf.formats import cache_nbytes
from labkit.perf.machine import sheet
from labkit.perf.memory import weights_nbytes


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
    ceiling = [100 / sheet(gpu).ridge("fp16") for gpu in ("A100-80GB", "H200")]
    needed = [batch_for_mfu(gpu, 0.3) for gpu in ("A100-80GB", "H200")]
    return [
        {
            "claim": "the cache saves 5x or more",
            "recomputed": f"{recomputation_ratio(0, 300):.0f}x fewer FLOPs over 300 tokens",
            "caveat": "A ratio of FLOPs. The wall clock depends: a small model on a big GPU may gain nothing.",
        },
        {
            "claim": "a 13B cache is about 1 MB (800 KiB) a token, 4 GB at 4K",
            "recomputed": f"{per_token:,} B = {per_token / 1024:.0f} KiB; {per_token * 4096 / 1e9:.2f} GB at 4,096",
            "caveat": f"Only without shared key heads. The model on this page takes {ours:,} B a token.",
        },
        {
            "claim": "7B weights: 28 / 14 / 7 / 3.5 GB",
            "recomputed": " / ".join(f"{size:.2f}" for size in sizes) + " GB",
            "caveat": "6.74 billion, not 7; labkit's int8 and int4 hold scales too, and int4 keeps the head in int8.",
        },
        {
            "claim": "decode runs at 30 % utilisation",
            "recomputed": f"MFU at batch 1 is at most {ceiling[0]:.2f} % (A100), {ceiling[1]:.2f} % (H200)",
            "caveat": f"30 % MFU takes a batch of {needed[0]:.0f} (A100) or {needed[1]:.0f} (H200): name the metric.",
        },
    ]
