"""What a lossy cache costs in quality: perplexity and logits against the lossless one, on the same tokens.

The text goes through the model in small chunks, so that each chunk sees what came before it as the cache stores it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from labkit import registry
from labkit.kvcache.base import KVCache


@dataclass(frozen=True)
class Quality:
    """Over ``n_tokens`` predicted tokens, those of every text's first ``n_skipped`` left out."""

    kind: str
    perplexity: float
    lossless_perplexity: float
    logit_error: float
    """Root mean square difference of the logits, over their standard deviation."""
    kl_divergence: float
    """Mean KL(lossless || lossy) of the next token's distribution, in nats."""
    same_token: float
    """Share of positions where the most likely token is the same."""
    n_tokens: int
    nbytes: int

    @property
    def perplexity_change(self) -> float:
        """Relative: 0.01 is one per cent worse."""
        return self.perplexity / self.lossless_perplexity - 1


@torch.inference_mode()
def measure_quality(
    model: Any,
    texts: Sequence[Sequence[int]],
    choices: Sequence[Any],
    *,
    chunk_tokens: int = 32,
    n_skipped: int = 0,
    progress: Callable[[float, str], None] = lambda fraction, words: None,
) -> list[Quality]:
    """Send each text of token ids through ``model`` once losslessly and once with each cache of ``choices``.

    Skip as many tokens as a cache keeps exact (its recent window) to see what is lost at length. Raises ValueError
    when a text is no longer than ``n_skipped``."""
    if any(len(ids) < n_skipped + 2 for ids in texts):
        raise ValueError(f"every text needs more than n_skipped={n_skipped} tokens, at least two.")
    sums = [_Sums() for _ in choices]
    done, total = 0, sum(len(ids) - 1 for ids in texts)
    for ids in texts:
        exact, *others = (_build(model, choice, len(ids)) for choice in ("contiguous", *choices))
        for sum_, cache in zip(sums, others, strict=True):
            sum_.kind, sum_.nbytes = cache.kind, max(sum_.nbytes, cache.nbytes)
        for start in range(0, len(ids) - 1, chunk_tokens):
            chunk = list(ids[start : min(start + chunk_tokens, len(ids) - 1)])
            targets = torch.tensor(ids[start + 1 : start + 1 + len(chunk)], device=model.device)
            counted = slice(max(0, n_skipped - start), None)
            expected = model(chunk, exact)
            for sum_, cache in zip(sums, others, strict=True):
                sum_.add(model(chunk, cache)[counted], expected[counted], targets[counted])
            done += len(chunk)
            progress(done / total, f"{done} of {total} tokens")
    return [sum_.result() for sum_ in sums]


def _build(model: Any, choice: Any, n_tokens: int) -> KVCache:
    component, config = registry.find("kv_cache", choice)
    layers = model.transformer.cache_entries
    return component.build(config, layers=layers, capacity_tokens=n_tokens, device=model.device, dtype=model.dtype)


@dataclass
class _Sums:
    kind: str = ""
    nbytes: int = 0
    n: int = 0
    loss: float = 0.0
    exact_loss: float = 0.0
    divergence: float = 0.0
    same: int = 0
    squared_error: float = 0.0
    squared: float = 0.0

    def add(self, logits: torch.Tensor, expected: torch.Tensor, targets: torch.Tensor) -> None:
        """logits and expected (T, V), targets (T,)."""
        if not len(targets):
            return
        ours, exact = logits.log_softmax(-1), expected.log_softmax(-1)
        self.n += len(targets)
        self.loss -= float(ours.gather(1, targets[:, None]).sum())
        self.exact_loss -= float(exact.gather(1, targets[:, None]).sum())
        self.divergence += float((exact.exp() * (exact - ours)).sum())
        self.same += int((logits.argmax(-1) == expected.argmax(-1)).sum())
        self.squared_error += float((logits - expected).square().mean(-1).sum())
        self.squared += float(expected.var(-1).sum())

    def result(self) -> Quality:
        return Quality(
            kind=self.kind,
            perplexity=math.exp(self.loss / self.n),
            lossless_perplexity=math.exp(self.exact_loss / self.n),
            logit_error=math.sqrt(self.squared_error / self.squared),
            kl_divergence=self.divergence / self.n,
            same_token=self.same / self.n,
            n_tokens=self.n,
            nbytes=self.nbytes,
        )
