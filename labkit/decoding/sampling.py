"""What a sampler means: the distribution that temperature and cut-offs shape, in the usual order: repetition penalty,
temperature, top-k, top-p, min-p. ``sampler`` draws from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.registry import option, register

NEVER = float("-inf")
COLDEST, HOTTEST = 1e-30, 3e38
"""Temperatures outside are taken as these: a logit divided by less, or more itself, would leave float32's range."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The defaults are greedy: the most likely token, always.

    temperature         divides the logits; 0 is greedy
    top_k               keep the k most likely tokens; 0 keeps all
    top_p               keep the smallest set that holds this much probability (Holtzman, arXiv 1904.09751)
    min_p               keep tokens at least this fraction as likely as the best (arXiv 2407.01082)
    repetition_penalty  divides (or multiplies, if negative) the logits of tokens seen before (arXiv 1909.05858)
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, good, rule in (
            ("temperature", 0 <= self.temperature < float("inf"), "0 or more (0 is greedy)"),
            ("top_k", type(self.top_k) is int and self.top_k >= 0, "a whole number, 0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (1 is off)"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 (off) and 1"),
            ("repetition_penalty", 1e-6 <= self.repetition_penalty <= 1e6, "between 1e-6 and 1e6 (1 is off)"),
        ):
            if not good:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be {rule}.")


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make tokens that already occur less likely: logits (V,), seen (n,) ids."""
    picked = logits[seen]
    return logits.scatter(0, seen, torch.where(picked > 0, picked / penalty, picked * penalty))


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """All but the k largest become impossible; ties with the k-th stay."""
    if k >= len(logits):
        return logits
    return logits.masked_fill(logits < logits.topk(k).values[-1], NEVER)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the fewest tokens whose probabilities reach p, at least one."""
    ordered, ids = logits.sort(descending=True)
    probabilities = ordered.softmax(0)
    before = probabilities.cumsum(0) - probabilities
    before[0] = -1.0  # below any p, however small
    return logits.scatter(0, ids, ordered.masked_fill(before >= p, NEVER))


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Keep tokens at least p times as likely as the most likely one."""
    return logits.masked_fill(logits < logits.max() + torch.tensor(p).log().item(), NEVER)


def shape_logits(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """The logits (V,) float32 that a draw is made from: temperature and every cut-off applied."""
    logits = logits.float()
    if sampling.repetition_penalty != 1.0 and seen is not None:
        logits = penalize_repetition(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0.0:
        return logits
    logits = logits / min(max(sampling.temperature, COLDEST), HOTTEST)
    if sampling.top_k:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1.0:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p:
        logits = keep_min_p(logits, sampling.min_p)
    return logits


# The ready-made samplers of the widgets: each shows only the knobs it has.


@dataclass(frozen=True)
class Temperature:
    temperature: float = option(0.8, low=0.05, high=2.0, step=0.05, help="below 1 sharper, above 1 flatter")


@dataclass(frozen=True)
class TopK(Temperature):
    top_k: int = option(40, low=1, high=1000, step=1, help="how many candidates stay")


@dataclass(frozen=True)
class TopP(Temperature):
    top_p: float = option(0.9, low=0.05, high=1.0, step=0.05, help="how much probability stays")


@dataclass(frozen=True)
class MinP(Temperature):
    min_p: float = option(0.05, low=0.0, high=1.0, step=0.01, help="least likelihood, relative to the best")


@dataclass(frozen=True)
class Penalized:
    repetition_penalty: float = option(1.2, low=1.0, high=2.0, step=0.05, help="1 is off")


@register("sampler", "greedy", summary="The most likely token, always: no chance involved")
def greedy(config: None) -> Sampling:
    return Sampling()


def _from_options(config: Any) -> Sampling:
    return Sampling(**vars(config))


register("sampler", "temperature", config=Temperature, summary="A draw from the whole distribution")(_from_options)
register("sampler", "top-k", config=TopK, summary="A draw from the k most likely tokens")(_from_options)
register("sampler", "top-p", config=TopP, summary="A draw from the nucleus that holds p of the probability")(
    _from_options
)
register("sampler", "min-p", config=MinP, summary="A draw from the tokens nearly as likely as the best")(_from_options)
register("sampler", "no-repeat", config=Penalized, summary="Greedy, with tokens seen before made less likely")(
    _from_options
)
