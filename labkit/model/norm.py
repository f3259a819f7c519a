"""Norms keep the hidden states at one size, so that thirty layers in a row neither explode nor fade.

    RMSNorm    x / sqrt(mean(x^2) + eps) * weight                  (Zhang & Sennrich, arXiv 1910.07467)
    LayerNorm  (x - mean(x)) / sqrt(var(x) + eps) * weight + bias  (Ba et al., arXiv 1607.06450)

Both work on each token's M values alone; x is (..., M), so a norm over every head's D values (QK-norm) is the
same code. Where a block's norms stand (before, after, or both) is its ``Layer.norms``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.kernels import ops
from labkit.model.config import Norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight; with ``unit_offset`` (Gemma) the weight is stored less 1."""

    def __init__(self, width: int, config: Norm) -> None:
        super().__init__()
        self.eps, self.unit_offset = config.eps, config.unit_offset
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, unit_offset=self.unit_offset)


class LayerNorm(nn.Module):
    """(x - mean(x)) / std(x) * weight + bias."""

    def __init__(self, width: int, config: Norm) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(width), requires_grad=False) if config.bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def build_norm(width: int, config: Norm) -> nn.Module:
    return (RMSNorm if config.kind == "rms" else LayerNorm)(width, config)
