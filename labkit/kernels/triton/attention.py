# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Attention of one new token over the valid span of a contiguous cache (Flash-Decoding): the stored keys are cut into
stretches that run side by side, and the parts are merged. The span's length is read on the device, so that a CUDA
graph of this step can be replayed as the sequence grows; stretches beyond it return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _stretch(
    q, k, v, n_stored, parts, tops, sums, capacity, scale, window, n_sinks, softcap,
    ROWS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    HEADS: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """One KV head and one stretch of KEYS keys, for the ROWS query heads that share it."""
    group, stretch = tl.program_id(0), tl.program_id(1)
    n = tl.load(n_stored)
    rows, d, tile = tl.arange(0, HEADS), tl.arange(0, WIDTH), tl.arange(0, TILE)
    in_rows, in_d = rows < ROWS, d < D
    qs = tl.load(
        q + (group * ROWS + rows[:, None]) * D + d[None, :], mask=in_rows[:, None] & in_d[None, :], other=0.0
    ).to(tl.float32)
    top = tl.full((HEADS,), -1e30, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    mixed = tl.zeros((HEADS, WIDTH), tl.float32)
    start = stretch * KEYS
    end = tl.minimum(start + KEYS, n)
    for first in range(start, end, TILE):
        keys = first + tile
        seen = keys < end
        if WINDOWED:
            seen = seen & ((keys >= n - window) | (keys < n_sinks))
        there = (keys < end)[:, None] & in_d[None, :]
        at = (group * capacity + keys[:, None]) * D + d[None, :]
        ks = tl.load(k + at, mask=there, other=0.0).to(tl.float32)
        scores = tl.sum(qs[:, None, :] * ks[None, :, :], axis=2) * scale  # (HEADS, TILE)
        if CAPPED:
            e = tl.exp(-2.0 * tl.abs(scores / softcap))
            scores = softcap * tl.where(scores < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e)
        scores = tl.where(seen[None, :], scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp(top - higher)
        p = tl.where(seen[None, :], tl.exp(scores - higher[:, None]), 0.0)
        total = total * shrink + tl.sum(p, axis=1)
        vs = tl.load(v + at, mask=there, other=0.0).to(tl.float32)
        mixed = mixed * shrink[:, None] + tl.sum(p[:, :, None] * vs[None, :, :], axis=1)
        top = higher
    slot = (group * ROWS + rows) * tl.num_programs(1) + stretch
    tl.store(tops + slot, top, mask=in_rows)
    tl.store(sums + slot, total, mask=in_rows)
    tl.store(parts + slot[:, None] * D + d[None, :], mixed, mask=in_rows[:, None] & in_d[None, :])


@triton.jit
def _merge(parts, tops, sums, out, n_parts, D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    head = tl.program_id(0)
    part, d = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    there = part < n_parts
    top = tl.load(tops + head * n_parts + part, mask=there, other=-1e30)
    share = tl.where(there, tl.exp(top - tl.max(top, axis=0)), 0.0)
    total = tl.sum(share * tl.load(sums + head * n_parts + part, mask=there, other=0.0), axis=0)
    at = (head * n_parts + part[:, None]) * D + d[None, :]
    rows = tl.load(parts + at, mask=there[:, None] & (d < D)[None, :], other=0.0)
    y = tl.sum(rows * share[:, None], axis=0) / total
    tl.store(out + head * D + d, y.to(out.dtype.element_ty), mask=d < D)


def attend_one(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, n_stored: Tensor, *, scale: float, window: int | None = None,
    n_sinks: int = 0, softcap: float | None = None, keys_a_stretch: int = 256,
) -> Tensor:  # fmt: skip
    """softmax(scale q K^T) V of one token: q (1, H, D), caches (G, capacity, D), n_stored (1,) int on the device, the
    new token included. Equals ``ops.attend`` over the first n_stored keys."""
    _, n_heads, d = q.shape
    groups, capacity, _ = k_cache.shape
    rows, n_parts = n_heads // groups, triton.cdiv(capacity, keys_a_stretch)
    out = torch.empty_like(q)
    parts = torch.empty((n_heads, n_parts, d), dtype=torch.float32, device=q.device)
    tops, sums = (torch.empty((n_heads, n_parts), dtype=torch.float32, device=q.device) for _ in range(2))
    _stretch[(groups, n_parts)](
        q.contiguous(), k_cache, v_cache, n_stored, parts, tops, sums, capacity, scale, window or 0, n_sinks,
        softcap or 1.0, ROWS=rows, D=d, KEYS=keys_a_stretch, TILE=32, WIDTH=triton.next_power_of_2(d),
        HEADS=triton.next_power_of_2(rows), CAPPED=softcap is not None, WINDOWED=window is not None,
    )  # fmt: skip
    _merge[(n_heads,)](
        parts, tops, sums, out, n_parts, D=d, WIDTH=triton.next_power_of_2(d), PARTS=triton.next_power_of_2(n_parts)
    )
    return out
