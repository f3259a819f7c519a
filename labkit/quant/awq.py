"""AWQ: give the weights that meet large activations a finer place on the grid (arXiv 2306.00978).

    W x = (W diag(s)) (diag(s)^-1 x)        s_k = mean|x_k|^a, divided by sqrt(max s min s)

In exact arithmetic nothing changes; rounded, the error of input k shrinks by s_k, and the others pay. The exponent a
is searched over 0, 0.05, ... 0.95 for the smallest output error ||(Q(W diag(s)) diag(s)^-1 - W) X||^2 (eq. 4), which
H = X X^T tells exactly: a trace for each candidate, and no second pass over the text. 1/s goes into whatever made x: a
norm's weight, or the rows of the linear before. Where that is not possible (grouped-query attention: a value head feeds
several query heads) the input is left alone. Then a clip of each group, from 1.0 down to 0.55 of its largest weight in
ten steps, again for the smallest output error; not for queries and keys, whose product it would skew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.quant.grid import Grid

N_EXPONENTS = 20
N_CLIPS = 10
CLIP_STEP = 0.05


def search_scales(
    weights: Sequence[Tensor], hessian: Tensor, mean_abs: Tensor, grid: Grid, group_size: int
) -> tuple[Tensor, float]:
    """The scales (K,) of an input that ``weights`` (N, K) share, and the exponent that gave them.

    ``mean_abs`` (K,): the mean size of each input. The exponent 0 (all scales 1) is among the candidates, so the
    result is never worse than rounding as it is, on this text."""
    joined = torch.cat([w.float() for w in weights])
    best, scales, exponent = float("inf"), torch.ones_like(mean_abs), 0.0
    for step in range(N_EXPONENTS):
        a = step / N_EXPONENTS
        s = mean_abs.float().clamp_min(1e-4) ** a
        s = s / (s.max() * s.min()).sqrt()
        d = grid.nearest(joined * s, group_size).dequantize() / s - joined
        error = float(((d @ hessian) * d).sum())
        if error < best:
            best, scales, exponent = error, s, a
    return scales, exponent


def search_clip(weight: Tensor, hessian: Tensor, grid: Grid, group_size: int) -> Tensor:
    """W (N, K) with each group's outliers cut to where its own part of the output errs least."""
    w = weight.float().unflatten(1, (-1, group_size))  # (N, G, g)
    n_groups = w.shape[1]
    blocks = hessian.float().unflatten(0, (n_groups, -1)).unflatten(2, (n_groups, -1))
    own = torch.diagonal(blocks, dim1=0, dim2=2).permute(2, 0, 1)  # (G, g, g): the group's own inputs
    top = w.abs().amax(dim=-1, keepdim=True)
    best, clipped = torch.full(w.shape[:2], float("inf")), w.clone()
    for step in range(N_CLIPS):
        limit = top * (1.0 - CLIP_STEP * step)
        cut = torch.minimum(torch.maximum(w, -limit), limit)
        d = grid.nearest(cut.flatten(1), group_size).dequantize().view_as(w) - w
        error = (torch.einsum("ngi,gij->ngj", d, own) * d).sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        clipped = torch.where(better[..., None], cut, clipped)
    return clipped.flatten(1)
