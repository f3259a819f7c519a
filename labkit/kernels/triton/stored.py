"""Attention of a few new tokens over a cache as it is stored, on a GPU: fp32, bf16, fp16, int8 or int4 blocks.

    attend(stored, table, rows, q, longest=..., scale=...) -> (T, H, Dv)

One program a query row, KV head and stretch of tokens (Flash-Decoding). It walks over the blocks of its stretch, reads
each stored number once for all the query heads that share it, and leaves a running maximum, sum and mix; the
stretches are merged at the end. Nothing is dequantised into memory. ``labkit.kernels.cpu.stored`` does the same on a
CPU; ``labkit.kvcache.quantized`` has the layouts.

No tensor cores: one query a head is a matrix-vector product, bound by the bytes. bf16 grids are widened by a shift, so
that a GPU without bf16 (a T4) reads them too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_STRETCH = 256
"""Tokens that one program has to itself before another is started for the same row."""
MAX_STRETCHES = 64


@triton.jit
def _widen_bf16(address, mask):  # type: ignore[no-untyped-def]
    """bf16 numbers, given as int16, to float32."""
    bits = tl.load(address, mask=mask, other=0).to(tl.int32)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _absorb(scores, v, m, total, acc):  # type: ignore[no-untyped-def]
    """Online softmax: scores (R, N), v (N, Dv); m, total (R,), acc (R, Dv)."""
    best = tl.maximum(m, tl.max(scores, 1))
    shrink = tl.exp(m - best)
    p = tl.exp(scores - best[:, None])
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None] + tl.sum(p[:, :, None] * v[None, :, :], 1)
    return best, total, acc


@triton.jit
def _stretch(  # type: ignore[no-untyped-def]
    q_ptr, table_ptr, rows_ptr, state_ptr,
    k_ptr, k_scale_ptr, k_zero_ptr, v_ptr, v_scale_ptr, v_zero_ptr, recent_k_ptr, recent_v_ptr,
    n_blocks, table_stride, n_heads, ring, n_sinks, scale, softcap, n_stretches,
    KIND: tl.constexpr, BLOCK: tl.constexpr, G: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr,
    DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, V_GRIDS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    g = tl.program_id(1)
    part = tl.program_id(2)
    seq = tl.load(rows_ptr + row * 4)
    first = tl.load(rows_ptr + row * 4 + 1)
    last = tl.load(rows_ptr + row * 4 + 2)
    blocked = tl.load(rows_ptr + row * 4 + 3)
    r = tl.arange(0, R_PAD)
    dk = tl.arange(0, DK_PAD)
    dv = tl.arange(0, DV_PAD)
    t = tl.arange(0, BLOCK)
    q_at = q_ptr + (row * n_heads + g * R + r[:, None]) * DK + dk[None, :]
    q = tl.load(q_at, mask=(r[:, None] < R) & (dk[None, :] < DK), other=0.0).to(tl.float32) * scale
    m = tl.full((R_PAD,), -1e30, tl.float32)
    total = tl.zeros((R_PAD,), tl.float32)
    acc = tl.zeros((R_PAD, DV_PAD), tl.float32)
    # Positions are walked over block by block, the sinks' blocks first, then those of the window; in the ring a "block"
    # is a run of BLOCK positions. This program takes every n_stretches-th.
    sink_blocks = (tl.minimum(n_sinks, first) + BLOCK - 1) // BLOCK
    low = tl.maximum(first // BLOCK, sink_blocks)
    n_steps = sink_blocks + (last + BLOCK - 1) // BLOCK - low
    step = part
    while step < n_steps:
        logical = tl.where(step < sink_blocks, step, low + step - sink_blocks)
        positions = logical * BLOCK + t
        seen = (positions < last) & ((positions >= first) | (positions < n_sinks))
        if logical * BLOCK < blocked:
            physical = tl.load(table_ptr + seq * table_stride + logical).to(tl.int64)
            home = g * n_blocks + physical
            d_mask = dk[None, :] < DK
            if KIND == 0:
                k = tl.load(k_ptr + (home * BLOCK + t[:, None]) * DK + dk[None, :], mask=d_mask, other=0.0).to(
                    tl.float32
                )
            else:
                scales = _widen_bf16(k_scale_ptr + home * DK + dk, dk < DK)
                zeros = _widen_bf16(k_zero_ptr + home * DK + dk, dk < DK)
                if KIND == 8:
                    codes = tl.load(k_ptr + (home * DK + dk[None, :]) * BLOCK + t[:, None], mask=d_mask, other=0)
                    codes = codes.to(tl.float32)
                else:
                    half = BLOCK // 2
                    packed = tl.load(k_ptr + (home * DK + dk[None, :]) * half + t[:, None] % half, mask=d_mask, other=0)
                    codes = ((packed.to(tl.int32) >> (4 * (t[:, None] // half))) & 15).to(tl.float32)
                k = codes * scales[None, :] + zeros[None, :]
            v_mask = dv[None, :] < DV
            if KIND == 0:
                v = tl.load(v_ptr + (home * BLOCK + t[:, None]) * DV + dv[None, :], mask=v_mask, other=0.0).to(
                    tl.float32
                )
            else:
                grid = (home * V_GRIDS + dv[None, :] // (DV // V_GRIDS)) * BLOCK + t[:, None]
                scales_v = _widen_bf16(v_scale_ptr + grid, v_mask)
                zeros_v = _widen_bf16(v_zero_ptr + grid, v_mask)
                if KIND == 8:
                    codes_v = tl.load(v_ptr + (home * BLOCK + t[:, None]) * DV + dv[None, :], mask=v_mask, other=0)
                    codes_v = codes_v.to(tl.float32)
                else:
                    half_v = DV // 2
                    at = (home * BLOCK + t[:, None]) * half_v + dv[None, :] % half_v
                    packed_v = tl.load(v_ptr + at, mask=v_mask, other=0)
                    codes_v = ((packed_v.to(tl.int32) >> (4 * (dv[None, :] // half_v))) & 15).to(tl.float32)
                v = codes_v * scales_v + zeros_v
        else:
            slot = (seq * G + g).to(tl.int64) * ring + positions % ring
            k_mask = seen[:, None] & (dk[None, :] < DK)
            v_mask2 = seen[:, None] & (dv[None, :] < DV)
            k = tl.load(recent_k_ptr + slot[:, None] * DK + dk[None, :], mask=k_mask, other=0.0).to(tl.float32)
            v = tl.load(recent_v_ptr + slot[:, None] * DV + dv[None, :], mask=v_mask2, other=0.0).to(tl.float32)
        scores = tl.sum(q[:, None, :] * k[None, :, :], 2)
        if SOFTCAP:
            scores = softcap * (2 / (1 + tl.exp(-2 * scores / softcap)) - 1)
        scores = tl.where(seen[None, :], scores, -1e30)
        m, total, acc = _absorb(scores, v, m, total, acc)
        step += n_stretches
    width = DV_PAD + 2
    state = state_ptr + (((row * G + g) * n_stretches + part) * R_PAD + r) * width
    tl.store(state, m)
    tl.store(state + 1, total)
    tl.store(state[:, None] + 2 + dv[None, :], acc)


def attend(
    stored: dict[str, Tensor],
    table: Tensor,
    rows: Tensor,
    q: Tensor,
    *,
    longest: int,
    scale: float,
    n_sinks: int = 0,
    softcap: float | None = None,
) -> Tensor:
    """Attention of query rows (T, H, D) over what ``rows`` (T, 4) int32 lets each see.

    stored   the tensors of one layer, as a paged or a quantised cache names them
    table    (n_sequences, max_blocks) int32
    longest  tokens that the row with the most of them sees: how far the work is cut up
    """
    k, v = stored["k"], stored["v"]
    quantised = "k_scale" in stored
    n_groups, n_blocks = k.shape[:2]
    block = stored["v"].shape[2]
    n_rows, n_heads, d_k = q.shape
    d_v = v.shape[3] * (2 if v.dtype == torch.uint8 else 1)
    kind = 0 if not quantised else 4 if k.dtype == torch.uint8 else 8
    n_stretches = max(1, min(MAX_STRETCHES, -(-longest // MIN_STRETCH)))
    per_group = n_heads // n_groups
    padded: Any = {"R_PAD": _power(per_group), "DK_PAD": _power(d_k), "DV_PAD": _power(d_v)}
    state = torch.empty(
        (n_rows, n_groups, n_stretches, padded["R_PAD"], padded["DV_PAD"] + 2), dtype=torch.float32, device=q.device
    )
    grids = [stored[name].view(torch.int16) if quantised else k for name in ("k_scale", "k_zero", "v_scale", "v_zero")]
    recent = [stored.get(name, k) for name in ("recent_k", "recent_v")]
    _stretch[(n_rows, n_groups, n_stretches)](
        q.contiguous(), table, rows, state, k, grids[0], grids[1], v, grids[2], grids[3], *recent,
        n_blocks, table.shape[1], n_heads, recent[0].shape[2] if quantised else 1, n_sinks, scale,
        softcap or 1.0, n_stretches,
        KIND=kind, BLOCK=block, G=n_groups, R=per_group, DK=d_k, DV=d_v,
        V_GRIDS=stored["v_scale"].shape[2] if quantised else 1, SOFTCAP=softcap is not None, **padded,
    )  # fmt: skip
    return _merge(state, per_group, d_v).to(q.dtype)


def _merge(state: Tensor, per_group: int, d_v: int) -> Tensor:
    """softmax over all stretches from the softmax over each: (T, H, Dv) float32."""
    m, total, acc = state[..., 0], state[..., 1], state[..., 2 : 2 + d_v]  # (T, G, stretches, R_PAD[, Dv])
    weight = torch.exp(m - m.amax(2, keepdim=True))
    out = (acc * weight[..., None]).sum(2) / (total * weight).sum(2)[..., None]
    return out[:, :, :per_group].flatten(1, 2)


def _power(n: int) -> int:
    """The next power of two: Triton's blocks have such sizes."""
    return 1 << (n - 1).bit_length()
