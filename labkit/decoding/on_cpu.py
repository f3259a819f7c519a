"""The choice that ``sampling.shape_logits`` defines, where the logits are on the CPU: numpy, one thread, no sort of the
whole vocabulary. Right after a step, which has swept the caches, PyTorch's operations take three to nine times as long
(``benchmarks/sampling.py``).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from labkit.decoding.sampling import COLDEST, HOTTEST, Sampling


class Candidates(NamedTuple):
    """Tokens that may be drawn: ids (n,), None where that is every token, and their chances (n,), not yet divided by
    their sum; the largest is 1."""

    ids: np.ndarray | None
    weights: np.ndarray


def largest(logits: np.ndarray, sampling: Sampling, seen: Sequence[int]) -> int:
    """Index of the largest logit (V,) float32, or -1 when that is no number."""
    logits = _penalized(logits, sampling.repetition_penalty, seen)
    token_id = int(logits.argmax())  # a NaN counts as the largest
    return token_id if math.isfinite(logits[token_id]) else -1


def draw(logits: np.ndarray, sampling: Sampling, seen: Sequence[int], chance: random.Random) -> int:
    """A token id drawn from logits (V,) float32, or -1 when they are no numbers."""
    found = candidates(logits, sampling, seen)
    if found is None:
        return -1
    reached = found.weights.astype(np.float64).cumsum()
    at = int(reached.searchsorted(reached[-1] * (1.0 - chance.random())))  # in (0, sum]: weights of 0 are never met
    return at if found.ids is None else int(found.ids[at])


def candidates(logits: np.ndarray, sampling: Sampling, seen: Sequence[int] = ()) -> Candidates | None:
    """What remains of logits (V,) float32 after every cut-off; None when they are no numbers."""
    logits = _penalized(logits, sampling.repetition_penalty, seen)
    best = logits.max()
    if not math.isfinite(best):
        return None
    ids = None
    if 0 < sampling.top_k < len(logits):
        ids = np.flatnonzero(logits >= np.partition(logits, -sampling.top_k)[-sampling.top_k])
        logits = logits[ids]
    weights = logits - best
    weights /= np.float32(min(max(sampling.temperature, COLDEST), HOTTEST))
    np.exp(weights, out=weights)
    if sampling.top_p < 1.0:
        ids, weights = _nucleus(ids, weights, sampling.top_p)
    if sampling.min_p:
        ids, weights = _only(weights >= np.float32(sampling.min_p), ids, weights)
    return Candidates(ids, weights)


def _penalized(logits: np.ndarray, penalty: float, seen: Sequence[int]) -> np.ndarray:
    if penalty == 1.0 or not seen:
        return logits
    logits, at = logits.copy(), np.asarray(seen)
    picked = logits[at]
    logits[at] = np.where(picked > 0, picked / penalty, picked * penalty)
    return logits


def _only(which: np.ndarray, ids: np.ndarray | None, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    at = np.flatnonzero(which)
    return (at if ids is None else ids[at]), weights[at]


def _nucleus(ids: np.ndarray | None, weights: np.ndarray, p: float) -> tuple[np.ndarray, np.ndarray]:
    """The fewest whose sum reaches p of all. One below (1 - p) / n of the sum cannot be among them, as it and all
    smaller ones come to less than 1 - p: only the rest is sorted."""
    total = float(weights.sum(dtype=np.float64))
    ids, weights = _only(weights >= np.float32(0.999 * (1.0 - p) / len(weights) * total), ids, weights)
    ordered = np.sort(weights)[::-1]
    reached = ordered.cumsum(dtype=np.float64)
    n = 1 + min(int(reached.searchsorted(p * total)), len(ordered) - 1)
    stays = weights > ordered[n - 1]
    stays[np.flatnonzero(weights == ordered[n - 1])[: n - np.count_nonzero(stays)]] = True  # of equal ones, the first
    return _only(stays, ids, weights)
