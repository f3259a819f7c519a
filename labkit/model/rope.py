"""Rotary position embedding: a token's position turns its query and its key, so that their product depends
only on how far apart they are (Su et al., arXiv 2104.09864).

Pair i of a head's R rotary dims is a point in the plane. At position p it is turned by p * f_i radians::

    f_i = theta ** (-2i / R)           fast for the first pairs, slow for the last
    (a, b) -> (a cos - b sin, b cos + a sin)

A query turned by m f and a key turned by n f meet at the angle (m - n) f: shift both, and nothing changes.

A model that should read further than it was trained to needs slower turns, or it meets angles that it has
never seen. Each *scaling* below is one answer: a function from the trained frequencies to the stretched ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from labkit.model.config import Rope, RopeScaling


def trained_frequencies(rope: Rope, d_head: int) -> Tensor:
    """f_i = theta ** (-2i / R) of each pair, (R/2,) float32: radians a position, before any scaling.

    >>> trained_frequencies(Rope(theta=100.0), d_head=4)
    tensor([1.0000, 0.1000])
    """
    n_dims = rope.rotary_dims or d_head
    return rope.theta ** -(torch.arange(0, n_dims, 2, dtype=torch.float32) / n_dims)


def inverse_frequencies(rope: Rope, d_head: int, length_tokens: int = 0) -> Tensor:
    """Radians a position of each pair, (R/2,) float32, scaling applied.

    ``length_tokens`` is the length of text to turn for. Only dynamic NTK and LongRoPE look at it: what they do depends
    on it, and a key stored early must still fit a query that comes late, so all that a cache holds has one
    (``length_for``).
    """
    trained = trained_frequencies(rope, d_head)
    if rope.scaling is None:
        return trained
    return SCALINGS[rope.scaling.kind](trained, rope, rope.scaling, length_tokens)


def angles(
    rope: Rope, d_head: int, positions: Tensor, dtype: torch.dtype, *, length_tokens: int = 0
) -> tuple[Tensor, Tensor]:
    """cos and sin of every pair's angle at ``positions`` (T,): two of (T, R/2).

    Angles are taken in float32 whatever ``dtype`` is: bfloat16 has no distinct numbers for positions above 256.
    """
    frequencies = inverse_frequencies(rope, d_head, length_tokens).to(positions.device)
    return turn(frequencies, positions, dtype, attention_factor(rope))


def turn(frequencies: Tensor, positions: Tensor, dtype: torch.dtype, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of positions (T,) times frequencies (R/2,), both times ``factor``: two of (T, R/2)."""
    turns = positions.float()[:, None] * frequencies
    cos, sin = turns.cos(), turns.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    return cos.to(dtype), sin.to(dtype)


def attention_factor(rope: Rope) -> float:
    """What cos and sin are multiplied by: YaRN and LongRoPE sharpen the softmax of long contexts, others 1."""
    factor = rope.scaling.attention_factor if rope.scaling else None
    return 1.0 if factor is None else factor


def depends_on_length(rope: Rope | None) -> bool:
    """Whether the frequencies change with the length that a sequence may reach."""
    return rope is not None and rope.scaling is not None and rope.scaling.kind in ("dynamic", "longrope")


def length_for(ropes: Iterable[Rope | None], n_tokens: int, turned_for: int = 0) -> int:
    """The length that a text of ``n_tokens`` is turned for; 0 when no rotation goes by it.

    It follows the text and never the room that the text has, as in transformers: LongRoPE changes its divisors once,
    when the text outgrows the trained context. Dynamic NTK goes by the length that the text began with, and doubles
    that when the text outgrows it (transformers stretches it token by token, and leaves stored keys as they were).
    ``turned_for``: what the stored keys were turned for; another answer than that means to compute them again.
    """
    length = 0
    for scaling in {rope.scaling for rope in ropes if depends_on_length(rope) and rope is not None}:
        assert scaling is not None
        context = scaling.original_context
        if n_tokens <= context:
            length = max(length, context)
        elif scaling.kind == "longrope":
            length = max(length, context + 1)
        else:
            length = max(length, n_tokens if turned_for < context else turned_for * (1 + (n_tokens > turned_for)))
    return length


def _linear(trained: Tensor, rope: Rope, scaling: RopeScaling, length_tokens: int) -> Tensor:
    """Position interpolation (Chen et al., arXiv 2306.15595): every turn ``factor`` times slower."""
    return trained / scaling.factor


def _dynamic(trained: Tensor, rope: Rope, scaling: RopeScaling, length_tokens: int) -> Tensor:
    """NTK-aware, dynamic: beyond the trained context C a larger theta, so that fast pairs keep their turns.

    theta' = theta * (factor L / C - (factor - 1)) ** (R / (R - 2)); within the trained context nothing changes.
    """
    n_dims = 2 * len(trained)
    length = max(length_tokens, scaling.original_context)
    stretch = scaling.factor * length / scaling.original_context - (scaling.factor - 1)
    theta = rope.theta * stretch ** (n_dims / (n_dims - 2))
    return theta ** -(torch.arange(0, n_dims, 2, dtype=torch.float32) / n_dims)


def _yarn(trained: Tensor, rope: Rope, scaling: RopeScaling, length_tokens: int) -> Tensor:
    """YaRN (Peng et al., arXiv 2309.00071): interpolate slow pairs, leave fast ones, blend in between.

    A pair that turns more than ``beta_fast`` times within the trained context is left alone, one that turns less
    than ``beta_slow`` times is slowed by ``factor``, and a straight line over the pair's index joins the two.
    """
    n_dims = 2 * len(trained)

    def pair_that_turns(times: float) -> float:
        return n_dims * math.log(scaling.original_context / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, n_dims - 1)
    high += 0.001 if low == high else 0.0
    slowed = ((torch.arange(len(trained), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return trained / scaling.factor * slowed + trained * (1 - slowed)


def _llama3(trained: Tensor, rope: Rope, scaling: RopeScaling, length_tokens: int) -> Tensor:
    """Llama 3.1's: as YaRN, with the blend measured in turns within the trained context instead of in pairs."""
    turns = scaling.original_context * trained / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * trained / scaling.factor + kept * trained


def _longrope(trained: Tensor, rope: Rope, scaling: RopeScaling, length_tokens: int) -> Tensor:
    """LongRoPE (Ding et al., arXiv 2402.13753): one searched divisor for each pair, one set for short sequences
    and one for those that may outgrow the trained context."""
    is_long = length_tokens > scaling.original_context
    return trained / torch.tensor(scaling.long_factors if is_long else scaling.short_factors)


SCALINGS: dict[str, Callable[[Tensor, Rope, RopeScaling, int], Tensor]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
