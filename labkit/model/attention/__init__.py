"""Attention kinds, each chosen by the type of a layer's attention config."""

from __future__ import annotations

from typing import Any

from torch import nn

from labkit.kvcache import LayerEntries
from labkit.model.attention import compressed, grouped, kinds, latent
from labkit.model.config import CompressedAttention, GroupedAttention, LatentAttention, Norm

__all__ = ["build_attention", "entries_of", "kinds"]

_KINDS: dict[type, Any] = {
    GroupedAttention: grouped.Attention,
    LatentAttention: latent.Attention,
    CompressedAttention: compressed.Attention,
}


def build_attention(d_model: int, config: Any, norm: Norm) -> nn.Module:
    """The module that computes the kind of attention ``config`` describes."""
    return _KINDS[type(config)](d_model, config, norm)


def entries_of(config: Any) -> LayerEntries:
    """What a cache keeps for a layer with this attention."""
    return _KINDS[type(config)].entries(config)
