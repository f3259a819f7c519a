"""Attention over keys that arrive in pieces, in plain PyTorch: the same result, and never all keys at once."""

from __future__ import annotations

import torch
from torch import Tensor


class OnlineAttention:
    """softmax(scale q K^T) V, one piece of K and V at a time (Milakov & Gimelshein, arXiv 1805.02867).

    A running maximum m, sum l and mix o for each query::

        m' = max(m, max s);   l' = l e^(m - m') + sum e^(s - m');   o' = o e^(m - m') + e^(s - m') v
    """

    def __init__(self, q: Tensor, n_groups: int, *, scale: float, softcap: float | None = None) -> None:
        n_new, n_heads, _ = q.shape
        self.shape, self.dtype, self.softcap = (n_groups, n_heads // n_groups, n_new), q.dtype, softcap
        grouped = q.float().unflatten(1, (n_groups, -1)).permute(1, 2, 0, 3)  # (G, H/G, T, D)
        self.q = grouped.flatten(1, 2) * scale  # (G, H/G * T, D)
        self.m = q.new_full((*self.q.shape[:2], 1), -torch.inf, dtype=torch.float32)
        self.total = torch.zeros_like(self.m)
        self.mixed: Tensor | None = None

    def add(self, k: Tensor, v: Tensor, mask: Tensor | None = None) -> None:
        """k (G, S, D), v (G, S, Dv), mask (T, S) of what each query sees (None: everything)."""
        scores = torch.bmm(self.q, k.float().transpose(1, 2))  # (G, H/G * T, S)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if mask is not None:
            scores = scores.unflatten(1, self.shape[1:]).masked_fill(~mask, -torch.inf).flatten(1, 2)
        m = torch.maximum(self.m, scores.amax(-1, keepdim=True))
        # A query that has seen nothing yet has m = -inf; exp(-inf - 0) = 0 where exp(-inf + inf) would be nan.
        base = m.masked_fill(m == -torch.inf, 0.0)
        shrink = torch.exp(self.m - base)
        weights = torch.exp(scores.sub_(base))
        self.total = self.total * shrink + weights.sum(-1, keepdim=True)
        mixed = torch.bmm(weights, v.float())
        self.mixed = mixed if self.mixed is None else self.mixed.mul_(shrink).add_(mixed)
        self.m = m

    def result(self) -> Tensor:
        """(T, H, Dv) in q's dtype."""
        assert self.mixed is not None
        out = (self.mixed / self.total).unflatten(1, self.shape[1:])  # (G, H/G, T, Dv)
        return out.permute(2, 0, 1, 3).flatten(1, 2).to(self.dtype)
