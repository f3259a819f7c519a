# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Products of several tokens with packed weights: a few tokens read the packed form, many are worth unpacking it
first, for the tensor cores. A file's own blocks are unpacked tile by tile, within the product (``many``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.triton import many
from labkit.kernels.triton.dot import weights_at
from labkit.kernels.triton.product import Matrix, project

FEW_TOKENS = 8
"""Up to here the packed weights are read once for each token."""


@triton.jit
def _unpack(
    weight, scales, zeros, out, n_out, n_in, stride, n_groups,
    KIND: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    there = (rows < n_out) & (cols < n_in)
    wide = tl.minimum(rows, n_out - 1).to(tl.int64)
    y = weights_at(weight, scales, zeros, wide, cols, there, stride, n_groups, KIND, GROUP, HAS_ZEROS)
    tl.store(out + wide * n_in + cols, y.to(out.dtype.element_ty), mask=there)


def unpack(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """int8 or int4 weights as numbers of ``dtype`` (N, K)."""
    weight, scales, zeros, _ = matrix.addresses()
    out = torch.empty((matrix.n_out, matrix.n_in), dtype=dtype, device=weight.device)
    grid = (triton.cdiv(matrix.n_out, 16), triton.cdiv(matrix.n_in, 128))
    _unpack[grid](
        weight, scales, zeros, out, matrix.n_out, matrix.n_in, matrix.stride, matrix.n_groups, KIND=matrix.kind,
        GROUP=matrix.group, HAS_ZEROS=matrix.zeros is not None, ROWS=16, COLS=128,
    )  # fmt: skip
    return out


def linear(matrix: Matrix, x: Tensor) -> Tensor:
    """x W^T + b for x (..., K), in x's dtype."""
    if x.numel() // x.shape[-1] > FEW_TOKENS:
        if matrix.in_blocks:
            return many.linear(matrix, x)
        return F.linear(x, unpack(matrix, x.dtype), matrix.bias)
    out = x.new_empty((*x.shape[:-1], matrix.n_out))
    return project(x.contiguous(), [matrix], out)
