"""The operations that have a fast form, each in plain PyTorch: what every kernel must equal.

Shapes: T queries, S keys, H query heads, G KV heads, D head width, M model width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_QUERIES = 128
"""Queries at a time where a mask or a soft cap is needed."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, the mean in float32 (Zhang & Sennrich, arXiv 1910.07467).

    In a narrow dtype the normed values are rounded before the weight multiplies them, as Llama was trained;
    Gemma, with ``unit_offset``, rounds after.
    """
    if x.dtype == weight.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, 1.0 + weight if unit_offset else weight, eps)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half") -> Tensor:
    """Turn each pair of x's first 2*R dims by its angle: x (T, H, D), cos and sin (T, R), 2*R <= D.

    ``half`` pairs dim i with dim i + R (Llama's checkpoints), ``interleaved`` pairs 2i with 2i + 1 (the paper).
    """
    n = 2 * cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]  # (T, 1, R)
    turned, rest = x[..., :n], x[..., n:]
    if layout == "half":
        a, b = turned.chunk(2, dim=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
    pairs = (
        torch.addcmul(a * cos, b, sin, value=-1),  # a cos - b sin
        torch.addcmul(b * cos, a, sin),  # b cos + a sin
    )
    out = torch.cat(pairs, dim=-1) if layout == "half" else torch.stack(pairs, dim=-1).flatten(-2)
    return torch.cat((out, rest), dim=-1) if rest.shape[-1] else out


def visible(q_positions: Tensor, k_positions: Tensor, *, window: int | None = None, n_sinks: int = 0) -> Tensor:
    """Who sees whom, (T, S) bool: the past and itself, at most ``window`` back, and the first ``n_sinks``."""
    q, k = q_positions[:, None], k_positions[None, :]
    seen = k <= q
    if window is not None:
        seen = seen & ((k > q - window) | (k < n_sinks))
    return seen


def attention_weights(
    q: Tensor, k: Tensor, *, mask: Tensor | None, scale: float, softcap: float | None = None
) -> Tensor:
    """softmax(softcap(scale q k^T) + mask): q (T, H, D), k (G, S, D), mask (T, S) -> (H, T, S) float32.

    ``mask`` None: every query sees every key.

    The soft cap c tanh(s / c) keeps a score within +-c (Gemma 2, arXiv 2408.00118).
    """
    grouped = q.unflatten(1, (k.shape[0], -1)).float() * (scale if softcap is None else scale / softcap)
    scores = torch.einsum("tgrd,gsd->grts", grouped, k.float())
    if softcap is not None:
        scores = scores.tanh_().mul_(softcap)
    if mask is not None:
        hidden = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
        scores = scores.add_(hidden)
    return scores.softmax(dim=-1).flatten(0, 1)


def attend_einsum(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float, softcap: float | None = None
) -> Tensor:
    """Attention written out: q (T, H, D), k and v (G, S, D), mask (T, S) -> (T, H, D)."""
    weights = attention_weights(q, k, mask=mask, scale=scale, softcap=softcap)
    grouped = weights.unflatten(0, (k.shape[0], -1))  # (G, H/G, T, S)
    out = torch.einsum("grts,gsd->grtd", grouped, v.float()).flatten(0, 1)  # (H, T, D)
    return out.transpose(0, 1).to(q.dtype)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    n_past: int,
    scale: float,
    k_positions: Tensor | None = None,
    window: int | None = None,
    n_sinks: int = 0,
    softcap: float | None = None,
) -> Tensor:
    """Attention of T new tokens over S stored ones: q (T, H, D), k and v (G, S, D) -> (T, H, D).

    The new tokens are the last of the sequence (positions n_past ... n_past + T - 1). ``k_positions`` None means
    that k holds positions 0 ... S - 1.
    """
    n_new, n_heads, _ = q.shape
    n_groups, n_stored, _ = k.shape
    block = max(window or 0, BLOCK_QUERIES)
    if k_positions is None and n_new > block and (softcap is not None or window is not None):
        # A block of queries at a time, each over the keys it may see: less work, and no T x S scores in memory.
        starts = range(0, n_new, block)
        ends = [min(start + block, n_new) for start in starts]
        settings = {"scale": scale, "window": window, "n_sinks": n_sinks, "softcap": softcap}
        return torch.cat(
            [
                attend(q[a:b], k[:, : n_past + b], v[:, : n_past + b], n_past=n_past + a, **settings)
                for a, b in zip(starts, ends, strict=True)
            ]
        )
    if (
        k_positions is None
        and window is not None
        and not n_sinks
        and n_stored > n_past + n_new - 1
        and n_past >= window
    ):
        # Nothing before the first query's window is seen by anyone: leave it out.
        first = n_past - window + 1
        k, v, n_stored = k[:, first:], v[:, first:], n_stored - first
        k_positions = torch.arange(first, first + n_stored, device=q.device)
    sees_all = n_new == 1 and (window is None or (n_stored <= window and not n_sinks))
    if softcap is None and sees_all:
        # One query: its H/G heads that share a KV head become the rows of one product, and no mask is needed.
        out = F.scaled_dot_product_attention(
            q.reshape(1, n_groups, n_heads // n_groups, -1), k[None], v[None], scale=scale
        )
        return out.reshape(1, n_heads, -1)
    causal = n_past == 0 and n_stored == n_new and (window is None or n_new <= window) and k_positions is None
    if sees_all or (softcap is None and causal):
        mask = None
    else:
        if k_positions is None:
            k_positions = torch.arange(n_stored, device=q.device)
        q_positions = torch.arange(n_past, n_past + n_new, device=q.device)
        mask = visible(q_positions, k_positions, window=window, n_sinks=n_sinks)
    if softcap is not None:
        return attend_einsum(q, k, v, mask=mask, scale=scale, softcap=softcap)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],  # (1, H, T, D)
        k[None],
        v[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=n_groups != n_heads,
    )
    return out[0].transpose(0, 1)
