"""GPTQ: round a column, and let the columns that are still to come make up for its error (arXiv 2210.17323).

A linear's output error on the calibration's inputs X is ||(W - Q) X||^2, quadratic in Q with the Hessian H = X X^T for
every row alike. Column k is rounded to the grid; its error, divided by U_kk, moves all later columns along row k of U,
the upper Cholesky factor of H^-1: the step that makes the quadratic smallest again.

    e_k = (w_k - q_k) / U_kk            w_j -= e_k U_kj   for all j > k

Columns go in blocks of 128: inside a block one by one, and the columns after it once for all of the block's errors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from labkit.quant.grid import Grid, Groups, check_group_size

BLOCK = 128
"""Columns whose errors reach the rest of the matrix in one product."""


class Order(NamedTuple):
    """In which order columns are rounded, and what each error does to the later ones."""

    columns: Tensor
    """(K,): the column rounded at each turn."""
    factor: Tensor
    """U (K, K) upper triangular, float32, rows and columns in that order."""
    dead: Tensor
    """(K,) bool: inputs that were always zero."""


def order_of(hessian: Tensor, *, damping: float = 0.01, act_order: bool = False) -> Order:
    """From H (K, K), any scale: what ``round_columns`` needs, once for all matrices that share an input.

    ``damping``: this share of the mean of H's diagonal is added to it. ``act_order``: the largest inputs go first,
    while there are still many columns to make up for them. Raises ValueError when H is not finite.
    """
    h = hessian.double().clone()
    if not torch.isfinite(h).all():
        raise ValueError("the activations that GPTQ goes by are not finite: NaN or infinity on the calibration text.")
    diagonal = torch.diagonal(h)
    dead = diagonal == 0
    diagonal[dead] = 1.0
    columns = torch.argsort(diagonal, descending=True, stable=True) if act_order else torch.arange(len(h))
    h = h[columns][:, columns]
    torch.diagonal(h).add_(damping * diagonal.mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    return Order(columns, torch.linalg.cholesky(inverse, upper=True).float(), dead)


def round_columns(weight: Tensor, order: Order, grid: Grid, group_size: int, *, clip: bool = False) -> Groups:
    """W (N, K) to the grid, column by column. Raises ValueError when group_size does not divide K.

    ``clip``: a group's grid may leave its outermost weights outside, where that makes the group's own part of the loss
    smaller, the sum of ((w_k - q_k) / U_kk)^2.

    Columns in their own order: a group's grid is fitted when its first column comes, to what W has become by then.
    Another order: the grids are fitted to W as it came, so that a group stays a run of neighbouring inputs and nobody
    has to gather them later.
    """
    n_out, n_in = weight.shape
    check_group_size(n_in, group_size)
    columns, factor, dead = order
    w = weight.float().clone()
    w[:, dead] = 0.0
    static = not torch.equal(columns, torch.arange(n_in))
    importance = torch.empty(n_in)
    importance[columns] = torch.diagonal(factor).square().reciprocal()

    def fitted(groups: Tensor, first: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return grid.search(groups, importance[first : first + group_size]) if clip else grid.fit(groups)

    grids = [fitted(w[:, at : at + group_size], at) for at in range(0, n_in, group_size)] if static else []
    turned = w[:, columns].t().contiguous()  # (K, N): a column of W is a run of memory
    codes = torch.empty((n_in, n_out), dtype=torch.uint8)
    for start in range(0, n_in, BLOCK):
        block = turned[start : start + BLOCK]
        errors = torch.empty_like(block)
        for i in range(len(block)):
            turn = start + i
            group = int(columns[turn]) // group_size
            if not static and turn % group_size == 0:
                grids.append(fitted(block[i : i + group_size].t(), turn))
            code = grid.round(block[i][:, None], *grids[group])
            codes[turn] = code[:, 0].to(torch.uint8)
            error = (block[i] - grid.values(code, *grids[group])[:, 0]) / factor[turn, turn]
            errors[i] = error
            # by numpy: PyTorch would call its threads together for each of these, and wait for them on a busy machine
            later, pull = block[i + 1 :].numpy(), factor[turn, turn + 1 : start + len(block)].numpy()
            later -= np.multiply.outer(pull, error.numpy())
        turned[start + BLOCK :].addmm_(factor[start : start + BLOCK, start + BLOCK :].t(), errors, alpha=-1.0)
    back = torch.empty_like(codes)
    back[columns] = codes
    scales, zeros, minima = (None if p[0] is None else torch.stack(p, dim=1) for p in zip(*grids, strict=True))
    assert scales is not None
    return Groups(grid.bits, back.t().contiguous(), scales, zeros, minima)


def output_error(weight: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    """||(W - Q) X||^2 / ||W X||^2 from H = X X^T: what the layer's output loses, as a share of its power."""
    w, d, h = weight.double(), (weight.double() - rounded.double()), hessian.double()
    return float(((d @ h) * d).sum() / ((w @ h) * w).sum().clamp_min(1e-30))
