"""From token ids to vectors: one row of a table for each id, and for GPT-2 one more for each position.

    x_t = E[id_t] * scale + P[position_t]

E is (V, M); the scale is 1 but for Gemma (sqrt(M)); P (context, M) is learned and only GPT-2 has it: the other
families turn queries and keys instead (``rope``). Looking up costs no arithmetic: T rows of M values are read,
whatever V is. When the head is *tied*, the same table maps the last hidden state back to V logits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.model.config import ModelConfig


def build_positions(config: ModelConfig) -> nn.Embedding | None:
    """The table of learned positions (context, M), or None for a family that has none."""
    return nn.Embedding(config.context_tokens, config.d_model) if config.learned_positions else None


def embed(
    token_ids: Tensor,
    positions: Tensor,
    *,
    table: nn.Embedding,
    position_table: nn.Embedding | None = None,
    scale: float = 1.0,
) -> Tensor:
    """token_ids and positions (T,) -> (T, M).

    The scale is rounded to the table's dtype first, as Gemma was trained: sqrt(M) in bfloat16 is off by up to 0.4 %.
    """
    x = table(token_ids)
    if scale != 1.0:
        x = x * torch.tensor(scale, dtype=x.dtype).item()
    return x if position_table is None else x + position_table(positions)
