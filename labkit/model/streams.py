"""Residual streams: the river in several arms, which are mixed at every sub-layer (mHC, DeepSeek-V4).

    X (T, N, M)   N streams; they begin as N copies of the embedding
    z = W rms(X, its streams side by side)            (T, N + N + N N), float32, scaled and biased part by part
    x = sum over n of a_n X_n,   a = sigmoid(z_a) + eps                       what the sub-layer reads
    B = sinkhorn(softmax(z_B))   (N, N), rows and columns each sum to 1       how the streams mix
    X' = B^T X + c f(norm(x)),   c = 2 sigmoid(z_c)                           how its answer is shared out

A matrix whose rows and columns sum to 1 makes nothing larger, however many follow each other: that is the constraint
after which it is named. After the last layer the streams are read once more, by weights ``a`` of their own.

Sources: the V4 report (arXiv 2606.19348, section 2.2); hyper-connections (arXiv 2409.19606).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.model.config import Norm, Streams


class Mix(nn.Module):
    """What one sub-layer reads of the streams, how they mix, and how its answer is shared out."""

    why_not_compiled = "residual streams are not compiled."

    def __init__(self, d_model: int, config: Streams, norm: Norm) -> None:
        super().__init__()
        self.config, self.norm_eps = config, norm.eps
        n = config.n_streams
        self.weight = nn.Parameter(torch.empty((2 + n) * n, n * d_model), requires_grad=False)
        self.base = nn.Parameter(torch.empty((2 + n) * n), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(3), requires_grad=False)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Streams (T, N, M) to x (T, M), the mixed streams (T, N, M), and the shares c (T, N, 1)."""
        n, eps = self.config.n_streams, self.config.eps
        parts = [n, n, n * n]
        z_a, z_c, z_b = mixing(streams, self.weight, self.norm_eps).split(parts, dim=-1)
        b_a, b_c, b_b = self.base.float().split(parts)
        s_a, s_c, s_b = self.scale.float().unbind()
        x = ((z_a * s_a + b_a).sigmoid() + eps)[..., None] * streams
        mix = doubly_stochastic(((z_b * s_b + b_b).unflatten(-1, (n, n))).softmax(-1) + eps, self.config)
        shares = 2 * (z_c * s_c + b_c).sigmoid()
        dtype = streams.dtype
        return x.sum(1).to(dtype), mix.to(dtype).transpose(-1, -2) @ streams, shares.to(dtype)[..., None]


class Confluence(nn.Module):
    """The streams as one after the last layer: (T, N, M) -> (T, M)."""

    def __init__(self, d_model: int, config: Streams, norm: Norm) -> None:
        super().__init__()
        self.config, self.norm_eps = config, norm.eps
        n = config.n_streams
        self.weight = nn.Parameter(torch.empty(n, n * d_model), requires_grad=False)
        self.base = nn.Parameter(torch.empty(n), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(self, streams: Tensor) -> Tensor:
        z = mixing(streams, self.weight, self.norm_eps) * self.scale.float() + self.base.float()
        return ((z.sigmoid() + self.config.eps)[..., None] * streams).sum(1).to(streams.dtype)


def mixing(streams: Tensor, weight: Tensor, eps: float) -> Tensor:
    """W rms(streams side by side), float32: (T, N, M) -> (T, rows of W)."""
    flat = streams.flatten(1).float()
    return F.linear(F.rms_norm(flat, flat.shape[-1:], eps=eps), weight.float())


def doubly_stochastic(mix: Tensor, config: Streams) -> Tensor:
    """Sinkhorn and Knopp: columns and rows of mix (..., N, N) are divided by their sums in turn, columns last.

    >>> doubly_stochastic(torch.tensor([[3.0, 1.0], [1.0, 3.0]]), Streams(2))
    tensor([[0.7500, 0.2500],
            [0.2500, 0.7500]])
    """
    mix = mix / (mix.sum(-2, keepdim=True) + config.eps)
    for _ in range(config.n_rounds - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + config.eps)
        mix = mix / (mix.sum(-2, keepdim=True) + config.eps)
    return mix
