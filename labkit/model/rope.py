"""Rotary position embedding: a token's position turns its query and its key, so that their product depends
only on how far apart they are (Su et al., arXiv 2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.model.config import Rope


def inverse_frequencies(rope: Rope, d_head: int) -> Tensor:
    """theta ** (-2i / R) for each pair i of the R rotary dims, (R/2,) float32: radians a position."""
    n_dims = rope.rotary_dims or d_head
    return rope.theta ** -(torch.arange(0, n_dims, 2, dtype=torch.float32) / n_dims)


def angles(rope: Rope, d_head: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every pair's angle at ``positions`` (T,): two of (T, R/2)."""
    turns = positions.float()[:, None] * inverse_frequencies(rope, d_head).to(positions.device)
    return turns.cos().to(dtype), turns.sin().to(dtype)
