# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Products of packed weights with one or a few tokens, from the packed form: each program reads its rows once.

The int4 layout is ``labkit.quant.grid``'s: four rows a panel, 64 weights a block of 16 little-endian words whose nibble
j of word i is weight 16 j + i.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _int8(x, w, scales, out, n_out, n_in, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    t, rows = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < n_out
    total = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(0, n_in, COLS):
        cols = first + tl.arange(0, COLS)
        inside = cols < n_in
        xs = tl.load(x + t * n_in + cols, mask=inside, other=0.0).to(tl.float32)
        at = rows[:, None].to(tl.int64) * stride + cols[None, :]
        ws = tl.load(w + at, mask=there[:, None] & inside[None, :], other=0)
        total += ws.to(tl.float32) * xs[None, :]
    y = tl.sum(total, axis=1) * tl.load(scales + rows, mask=there, other=0.0)
    tl.store(out + t * n_out + rows, y.to(out.dtype.element_ty), mask=there)


def linear_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """As ``packed.linear_int8``, for few tokens: x (..., K), weight int8 (N, K padded), scales (N,)."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    n_out, n_in = weight.shape[0], flat.shape[1]
    out = torch.empty((len(flat), n_out), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(n_out, 8), len(flat))
    _int8[grid](flat, weight, scales, out, n_out, n_in, weight.stride(0), ROWS=8, COLS=256)
    out = out if bias is None else out + bias
    return out.view(*x.shape[:-1], n_out)


@triton.jit
def _int4(
    x, w, scales, zeros, out, n_out, n_in, n_blocks, n_groups,
    GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One panel of 4 rows and one token. w is int16: (panels, blocks, 4, 16)."""
    panel, t = tl.program_id(0), tl.program_id(1)
    row, i = tl.arange(0, 4), tl.arange(0, 16)
    total = tl.zeros((BLOCKS, 4, 16), tl.float32)
    for first in range(0, n_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        inside = block < n_blocks
        at = ((panel.to(tl.int64) * n_blocks + block[:, None, None]) * 4 + row[None, :, None]) * 16 + i[None, None, :]
        words = tl.load(w + at, mask=inside[:, None, None], other=0).to(tl.int32)
        for j in tl.static_range(4):
            col = block[:, None] * 64 + 16 * j + i[None, :]  # (BLOCKS, 16)
            xs = tl.load(x + t * n_in + col, mask=inside[:, None] & (col < n_in), other=0.0).to(tl.float32)
            group = (block * 64 + 16 * j) // GROUP
            cell = (panel * n_groups + group[:, None]) * 4 + row[None, :]  # (BLOCKS, 4)
            scale = tl.load(scales + cell, mask=inside[:, None], other=0.0).to(tl.float32)
            if HAS_ZEROS:
                zero = tl.load(zeros + cell, mask=inside[:, None], other=0).to(tl.float32)
            else:
                zero = tl.full((BLOCKS, 4), 8.0, tl.float32)
            q = ((words >> (4 * j)) & 15).to(tl.float32)
            total += (q - zero[:, :, None]) * scale[:, :, None] * xs[:, None, :]
    y = tl.sum(tl.sum(total, axis=2), axis=0)
    rows = panel * 4 + row
    tl.store(out + t * n_out + rows, y.to(out.dtype.element_ty), mask=rows < n_out)


def linear_int4(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int, n_out: int, bias: Tensor | None
) -> Tensor:
    """As ``packed.linear_int4``, for few tokens."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    words = weight.view(torch.int16)  # (panels, blocks, 4, 16)
    panels, n_blocks = words.shape[:2]
    out = torch.empty((len(flat), n_out), dtype=x.dtype, device=x.device)
    _int4[(panels, len(flat))](
        flat, words, scales, scales if zeros is None else zeros, out, n_out, flat.shape[1], n_blocks, scales.shape[1],
        GROUP=group_size, HAS_ZEROS=zeros is not None, BLOCKS=4,
    )  # fmt: skip
    out = out if bias is None else out + bias
    return out.view(*x.shape[:-1], n_out)
