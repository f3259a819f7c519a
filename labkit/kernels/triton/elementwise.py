# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Norm, rotary with append, and the gate: kernels that save trips to memory.

T tokens, M model width, H query heads, G KV heads, D head width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(x, weight, out, n, eps, UNIT_OFFSET: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < n
    v = tl.load(x + row * n + cols, mask=inside, other=0.0).to(tl.float32)
    turned = v / tl.sqrt(tl.sum(v * v, axis=0) / n + eps)
    w = tl.load(weight + cols, mask=inside, other=0.0)
    if UNIT_OFFSET:
        y = turned * (1.0 + w.to(tl.float32))
    else:
        y = turned.to(x.dtype.element_ty).to(tl.float32) * w.to(tl.float32)
    tl.store(out + row * n + cols, y.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """As ``ops.rms_norm``: x (..., M), the mean in float32. One program a row."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(flat)
    n = flat.shape[1]
    _rms_norm[(len(flat),)](flat, weight, out, n, eps, UNIT_OFFSET=unit_offset, BLOCK=triton.next_power_of_2(n))
    return out.view(x.shape)


@triton.jit
def _rotate_append(
    q, k, v, cos, sin, positions, q_out, k_cache, v_cache, capacity,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one token: heads 0..H-1 are queries, then G keys, then G values."""
    t, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + t)
    d = tl.arange(0, BLOCK)
    inside = d < D
    # A dim's partner, its angle's index and its sign: out[d] = x[d] cos + sign x[partner] sin.
    if INTERLEAVED:
        partner, pair, first = d ^ 1, d // 2, (d % 2) == 0
    else:
        first = d < R
        partner, pair = tl.where(first, d + R, d - R), d % R
    turned = d < 2 * R
    partner = tl.where(turned, partner, d)
    c = tl.load(cos + t * R + pair, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + t * R + pair, mask=turned, other=0.0).to(tl.float32)
    s = tl.where(first, -s, s)
    if head >= H + G:
        held = tl.load(v + (t * G + head - H - G) * D + d, mask=inside, other=0.0)
        to = v_cache + ((head - H - G) * capacity + position) * D
        tl.store(to + d, held.to(v_cache.dtype.element_ty), mask=inside)
        return
    at = q + (t * H + head) * D
    if head >= H:
        at = k + (t * G + head - H) * D
    x = tl.load(at + d, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(at + partner, mask=inside, other=0.0).to(tl.float32)
    out = x * c + y * s
    if head < H:
        tl.store(q_out + (t * H + head) * D + d, out.to(q_out.dtype.element_ty), mask=inside)
    else:
        to = k_cache + ((head - H) * capacity + position) * D
        tl.store(to + d, out.to(k_cache.dtype.element_ty), mask=inside)


def rotate_append(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor,
    *, layout: str = "half",
) -> Tensor:  # fmt: skip
    """Turn q (T, H, D) and k (T, G, D) by cos, sin (T, R), and write k and v into caches (G, capacity, D) at
    ``positions`` (T,). Returns the turned q."""
    n_tokens, n_heads, d = q.shape
    groups, out = k.shape[1], torch.empty_like(q)
    _rotate_append[(n_tokens, n_heads + 2 * groups)](
        q.contiguous(), k.contiguous(), v.contiguous(), cos.contiguous(), sin.contiguous(), positions, out,
        k_cache, v_cache, k_cache.shape[1], H=n_heads, G=groups, D=d, R=cos.shape[1],
        INTERLEAVED=layout == "interleaved", BLOCK=triton.next_power_of_2(d),
    )  # fmt: skip
    return out


@triton.jit
def _gate(g, u, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(u + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (x / (1.0 + tl.exp(-x)) * y).to(out.dtype.element_ty), mask=inside)


def gate(g: Tensor, u: Tensor) -> Tensor:
    """silu(g) * u, in one pass."""
    g, u = g.contiguous(), u.contiguous()
    out = torch.empty_like(g)
    _gate[(triton.cdiv(g.numel(), 1024),)](g, u, out, g.numel(), BLOCK=1024)
    return out
