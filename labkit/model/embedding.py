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


class UnknownToken(IndexError, ValueError):
    """A token id that the vocabulary does not have."""


def check_token_ids(token_ids: Tensor | int, vocab_size: int) -> None:
    """Raise UnknownToken unless every id is one of the vocabulary's: compiled code would read whatever lies there.

    Called where ids enter a step, and nowhere else."""
    if isinstance(token_ids, int):
        low = high = token_ids
    elif (
        token_ids.device.type == "cpu"
    ):  # numpy: right after a step, PyTorch's operations take a tenth of a millisecond
        ids = token_ids.numpy()
        low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
    else:
        low, high = (int(edge) for edge in token_ids.aminmax()) if len(token_ids) else (0, 0)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise UnknownToken(f"token {wrong} is not in the vocabulary of {vocab_size} (0 to {vocab_size - 1}).")


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
