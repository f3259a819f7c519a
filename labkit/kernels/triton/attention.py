# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# ruff: noqa: SIM102, SIM108 - compile-time choices, which Triton takes one at a time
"""Attention of one new token over a contiguous cache, from its projections to the mixed values, in one launch.

The stored keys are cut into stretches that run side by side (Flash-Decoding). Every program turns its own queries; the
one whose stretch the new token falls into turns and stores the new key; whoever finishes last merges the stretches.
The position is read on the device, so that a CUDA graph can be replayed as the sequence grows; programs beyond it
return at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.triton.chain import await_previous, chained

MAX_PARTS = 64
"""Stretches that are merged at once."""
TILE = 64
"""Keys that meet the queries in one product."""
MIN_HEADS = 16
"""Rows of the smallest product on the tensor cores."""


@triton.jit
def _halves(base, gain, d, in_d, R: tl.constexpr, INTERLEAVED: tl.constexpr, NORMED: tl.constexpr):
    """Heads that start at base (N, 1): each dim, the dim it is turned with, and the norm's weights of both."""
    if INTERLEAVED:
        partner = d ^ 1
    else:
        partner = tl.where(d < R, d + R, d - R)
    partner = tl.where(d < 2 * R, partner, d)
    x = tl.load(base + d, mask=in_d, other=0.0)
    y = tl.load(base + partner, mask=in_d, other=0.0)
    g, h = x, y
    if NORMED:
        g, h = tl.load(gain + d, mask=in_d, other=0.0), tl.load(gain + partner, mask=in_d, other=0.0)
    return x, y, g, h


@triton.jit
def _turned(x, y, g, h, c, s, eps, D: tl.constexpr, NORMED: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    """x cos + y sin, normed before where the model does so: (N, WIDTH) float32; s has the sign of each dim."""
    x, y = x.to(tl.float32), y.to(tl.float32)
    if NORMED:
        shrink = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        g, h = g.to(tl.float32), h.to(tl.float32)
        if UNIT_OFFSET:
            g, h = g + 1.0, h + 1.0
        x, y = x * shrink * g, y * shrink * h
    return x * c + y * s


@triton.jit
def _capped(scores, softcap):
    """softcap tanh(scores / softcap)."""
    e = tl.exp(-2.0 * tl.abs(scores / softcap))
    return softcap * tl.where(scores < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e)


@triton.jit
def _absorb(asked, ks, vs, seen, top, total, mixed, scale, softcap, CAPPED: tl.constexpr):
    """Online softmax: what one tile of keys adds to the running maximum, sum and mix of each head."""
    scores = tl.dot(asked, tl.trans(ks), input_precision="ieee") * scale  # (HEADS, TILE)
    if CAPPED:
        scores = _capped(scores, softcap)
    scores = tl.where(seen[None, :], scores, -1e30)
    higher = tl.maximum(top, tl.max(scores, axis=1))
    shrink = tl.exp(top - higher)
    p = tl.where(seen[None, :], tl.exp(scores - higher[:, None]), 0.0)
    mixed = tl.dot(p.to(vs.dtype), vs, mixed * shrink[:, None], input_precision="ieee")
    return higher, total * shrink + tl.sum(p, axis=1), mixed


@triton.jit
def _visible(keys, end, new, window, n_sinks, WINDOWED: tl.constexpr):
    """Which of the stored keys the new token sees."""
    seen = keys < end
    if WINDOWED:
        seen = seen & ((keys > new - window) | (keys < n_sinks))
    return seen


@triton.jit
def _attend(
    qkv, cos, sin, position, k, v, parts, tops, sums, counts, out, q_gain, k_gain, eps, capacity, scale, window,
    n_sinks, softcap,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, R: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, NORMED: tl.constexpr, UNIT_OFFSET: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One KV head and one stretch of KEYS keys, for the H / G query heads that share it."""
    ROWS: tl.constexpr = H // G
    group, stretch = tl.program_id(0), tl.program_id(1)
    await_previous(CHAINED)
    new = tl.load(position).to(tl.int32)
    start = stretch * KEYS
    if start > new:
        return
    d = tl.arange(0, WIDTH)[None, :]
    in_d = d < D
    home = group.to(tl.int64) * capacity
    end = tl.minimum(start + KEYS, new)  # the new token's own key comes after these
    tile = tl.arange(0, TILE)
    # Everything is asked for before anything is used.
    if INTERLEAVED:
        pair, first_half = d // 2, (d % 2) == 0
    else:
        pair, first_half = d % R, d < R
    c = tl.load(cos + new * R + pair, mask=d < 2 * R, other=1.0).to(tl.float32)
    s = tl.load(sin + new * R + pair, mask=d < 2 * R, other=0.0).to(tl.float32)
    rows, one = tl.arange(0, HEADS)[:, None], tl.arange(0, 1)[:, None]
    q_head = qkv + (group * ROWS + tl.where(rows < ROWS, rows, 0)) * D
    qx, qy, qg, qh = _halves(q_head, q_gain, d, in_d, R, INTERLEAVED, NORMED)
    kx, ky, kg, kh = _halves(qkv + (H + group + one) * D, k_gain, d, in_d, R, INTERLEAVED, NORMED)
    new_v = tl.load(qkv + (H + G + group + one) * D + d, mask=in_d, other=0.0)
    if KEYS == TILE:
        stored = (start + tile < end)[:, None] & in_d
        ks = tl.load(k + (home + start + tile[:, None]) * D + d, mask=stored, other=0.0)
        vs = tl.load(v + (home + start + tile[:, None]) * D + d, mask=stored, other=0.0)
    s = tl.where(first_half, -s, s)
    q = _turned(qx, qy, qg, qh, c, s, eps, D, NORMED, UNIT_OFFSET)
    new_k = _turned(kx, ky, kg, kh, c, s, eps, D, NORMED, UNIT_OFFSET)
    new_k, new_v = new_k.to(k.dtype.element_ty), new_v.to(v.dtype.element_ty)
    if new < start + KEYS:
        tl.store(k + (home + new + one) * D + d, new_k, mask=in_d)
        tl.store(v + (home + new + one) * D + d, new_v, mask=in_d)
    new_k, new_v = new_k.to(tl.float32), new_v.to(tl.float32)
    top = tl.full((HEADS,), -1e30, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    mixed = tl.zeros((HEADS, WIDTH), tl.float32)
    asked = q.to(k.dtype.element_ty)
    if KEYS == TILE:
        seen = _visible(start + tile, end, new, window, n_sinks, WINDOWED)
        top, total, mixed = _absorb(asked, ks, vs, seen, top, total, mixed, scale, softcap, CAPPED)
    else:
        first = start
        if WINDOWED:
            if start >= n_sinks:
                first = tl.maximum(start, new + 1 - window)
        for at_key in tl.range(first, end, TILE, num_stages=2):
            keys = at_key + tile
            at, in_tile = (home + keys[:, None]) * D + d, (keys < end)[:, None] & in_d
            ks = tl.load(k + at, mask=in_tile, other=0.0)
            vs = tl.load(v + at, mask=in_tile, other=0.0)
            seen = _visible(keys, end, new, window, n_sinks, WINDOWED)
            top, total, mixed = _absorb(asked, ks, vs, seen, top, total, mixed, scale, softcap, CAPPED)
    if new < start + KEYS:
        score = tl.sum(asked.to(tl.float32) * new_k, axis=1) * scale
        if CAPPED:
            score = _capped(score, softcap)
        higher = tl.maximum(top, score)
        shrink, p = tl.exp(top - higher), tl.exp(score - higher)
        total = total * shrink + p
        mixed = mixed * shrink[:, None] + p[:, None] * new_v
        top = higher
    heads = tl.arange(0, HEADS)
    slot = (group * ROWS + heads) * PARTS + stretch
    tl.store(tops + slot, top, mask=heads < ROWS)
    tl.store(sums + slot, total, mask=heads < ROWS)
    tl.store(parts + slot[:, None] * D + d, mixed, mask=(heads < ROWS)[:, None] & in_d)
    # The last of this group's programs to come here merges what all of them have left.
    n_parts = new // KEYS + 1
    tl.debug_barrier()
    done = tl.atomic_add(counts + group, 1, sem="acq_rel")
    if done == n_parts - 1:
        tl.store(counts + group, 0)
        part = tl.arange(0, PARTS)
        left = part < n_parts
        merged = tl.zeros((HEADS, WIDTH), tl.float32)
        for row in tl.static_range(ROWS):
            at_part = (group * ROWS + row) * PARTS + part
            peak = tl.load(tops + at_part, mask=left, other=-1e30, cache_modifier=".cg")
            summed = tl.load(sums + at_part, mask=left, other=0.0, cache_modifier=".cg")
            piece = tl.load(
                parts + at_part[:, None] * D + d, mask=left[:, None] & in_d, other=0.0, cache_modifier=".cg"
            )
            share = tl.where(left, tl.exp(peak - tl.max(peak, axis=0)), 0.0)
            y = tl.sum(piece * share[:, None], axis=0)[None, :] / tl.sum(share * summed, axis=0)
            merged = tl.where(rows == row, y, merged)
        tl.store(out + (group * ROWS + rows) * D + d, merged.to(out.dtype.element_ty), mask=(rows < ROWS) & in_d)


class Scratch:
    """What the stretches leave for whoever merges them; made once for all layers of a step."""

    def __init__(self, n_heads: int, n_groups: int, d_head: int, capacity: int, device: Any) -> None:
        self.keys = keys_a_stretch(capacity, n_groups)
        self.n_parts = triton.cdiv(capacity, self.keys)
        padded = triton.next_power_of_2(self.n_parts)
        self.parts = torch.empty(n_heads * padded * d_head, dtype=torch.float32, device=device)
        self.tops, self.sums = (torch.empty(n_heads * padded, dtype=torch.float32, device=device) for _ in range(2))
        self.counts = torch.zeros(n_groups, dtype=torch.int32, device=device)
        """How many programs of a group are done: zero between two launches."""


def keys_a_stretch(capacity: int, n_groups: int) -> int:
    """One tile, unless that makes far more programs than run at once, or more stretches than are merged at once."""
    wanted = max(TILE, capacity * n_groups // 512, triton.cdiv(capacity, MAX_PARTS))
    return triton.next_power_of_2(wanted)


def attend_one(
    qkv: Tensor, cos: Tensor, sin: Tensor, position: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor,
    scratch: Scratch, *, n_heads: int, scale: float, layout: str = "half", window: int | None = None, n_sinks: int = 0,
    softcap: float | None = None, q_norm: Any = None, k_norm: Any = None,
) -> Tensor:  # fmt: skip
    """softmax(scale rope(q) rope(K)^T) V of one token, which is stored on the way.

    qkv (H D + 2 G D,) its projections, cos and sin (capacity, R) of every position, position (1,) int64 on the device,
    caches (G, capacity, D), out (H D,). Equals ``ops.rotate``, an append and ``ops.attend`` over position + 1 keys.
    """
    groups, capacity, d = k_cache.shape
    width, heads = max(16, triton.next_power_of_2(d)), max(MIN_HEADS, triton.next_power_of_2(n_heads // groups))
    gain = (qkv, qkv, 0.0) if q_norm is None else (q_norm.weight, k_norm.weight, q_norm.eps)
    _attend[(groups, scratch.n_parts)](
        qkv, cos, sin, position, k_cache, v_cache, scratch.parts, scratch.tops, scratch.sums, scratch.counts, out,
        *gain, capacity, scale, window or 0, n_sinks, softcap or 1.0, H=n_heads, G=groups, D=d, R=cos.shape[1],
        KEYS=scratch.keys, TILE=min(TILE, scratch.keys), WIDTH=width, HEADS=heads,
        PARTS=triton.next_power_of_2(scratch.n_parts), INTERLEAVED=layout == "interleaved", CAPPED=softcap is not None,
        WINDOWED=window is not None, NORMED=q_norm is not None,
        UNIT_OFFSET=q_norm is not None and q_norm.unit_offset, **chained(qkv.device),
    )  # fmt: skip
    return out
