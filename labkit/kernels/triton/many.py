# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""A file's own blocks with many tokens: a tile of weights is unpacked in registers and goes to the tensor cores, so the
unpacked matrix is nowhere in memory. Every tile of tokens unpacks again; where that costs more than a pass through
memory has not been timed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.triton.blocks import PIECE, first_input, gap, row_halves
from labkit.kernels.triton.product import Matrix

ROWS, PIECES = 64, 2
"""Rows of weights a program has, and the pieces of each that it unpacks a turn."""


@triton.jit
def _tile(codes, scale, minimum, ROWS: tl.constexpr, N: tl.constexpr):
    """Codes (ROWS, P, 16), scale and minimum (ROWS, P, 1) to weights (ROWS, N = 16 P)."""
    return tl.reshape(codes * scale + minimum, (ROWS, N))


@triton.jit
def _many(
    x, w, s, bias, add, out, n_tokens, n_out, n_in,
    KIND: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr, BIASED: tl.constexpr,
    ADDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = 16 * PIECES
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(rows, n_out - 1).to(tl.int64)[:, None, None]
    tokens = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS))[:, None]
    at_token = x + tokens.to(tl.int64) * n_in
    pieces = tl.arange(0, PIECES)[None, :, None]
    lane = tl.arange(0, 16)[None, None, :]
    k = tl.arange(0, N)[None, :]
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for first in range(0, n_in // PIECE, PIECES):
        piece = first + pieces
        there = piece * PIECE < n_in
        low, high, s_low, s_high, m_low, m_high = row_halves(w, s, row, piece, lane, n_in, there, KIND)
        of_k = first + k // 16
        at = first_input(of_k, KIND) + k % 16
        inside = (tokens < n_tokens) & (of_k * PIECE < n_in)
        x_low = tl.load(at_token + at, mask=inside, other=0.0)
        x_high = tl.load(at_token + at + gap(KIND), mask=inside, other=0.0)
        if WIDE:
            x_low, x_high = x_low.to(tl.float32), x_high.to(tl.float32)
        w_low = _tile(low, s_low, m_low, ROWS, N).to(x_low.dtype)
        w_high = _tile(high, s_high, m_high, ROWS, N).to(x_high.dtype)
        total = tl.dot(x_low, tl.trans(w_low), total, input_precision="ieee")
        total = tl.dot(x_high, tl.trans(w_high), total, input_precision="ieee")
    there = (tokens < n_tokens) & (rows[None, :] < n_out)
    if BIASED:
        total += tl.load(bias + rows, mask=rows < n_out, other=0.0).to(tl.float32)[None, :]
    at = tokens.to(tl.int64) * n_out + rows[None, :]
    if ADDED:
        total += tl.load(add + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=there)


def linear(matrix: Matrix, x: Tensor, *, add_to: Tensor | None = None) -> Tensor:
    """x W^T + b (+ ``add_to``) for x (..., K) and W in ggml's blocks, in x's dtype: weights are rounded to it, sums are
    float32. Where bf16 has no product (a T4, Triton's interpreter) it is multiplied as float32."""
    x = x.contiguous()
    n_tokens = x.numel() // matrix.n_in
    out = x.new_empty((*x.shape[:-1], matrix.n_out))
    tokens = min(64, max(16, triton.next_power_of_2(n_tokens)))
    weight, halves, _, bias = matrix.addresses()
    _many[(triton.cdiv(matrix.n_out, ROWS), triton.cdiv(n_tokens, tokens))](
        x, weight, halves, bias, out if add_to is None else add_to.contiguous(), out, n_tokens, matrix.n_out,
        matrix.n_in, KIND=matrix.kind, TOKENS=tokens, ROWS=ROWS, PIECES=PIECES, BIASED=matrix.bias is not None,
        ADDED=add_to is not None, WIDE=x.dtype == torch.bfloat16 and not has_bf16(x.device),
    )  # fmt: skip
    return out


def has_bf16(device: torch.device) -> bool:
    """Whether ``device`` multiplies bf16."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8
