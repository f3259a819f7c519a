"""A prompt's attention over panels, and a few tokens' over rows, against float64 and each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from labkit.kernels.cpu import attention_few, attention_panels, attention_run, cells, memory, plan, rowwise


@njit
def run(n_threads, layer, numbers, held, q, n_tokens, n_past, own, panels, out):
    row = 4 * layer[plan.N_HEADS] * layer[plan.D_HEAD]
    for rank in range(n_threads):
        attention_panels.make(rank, n_threads, layer, held, n_past, n_tokens, 0, panels)
    for rank in range(n_threads):
        attention_run.attend(rank, n_threads, layer, numbers, q, row, n_tokens, n_past, panels, own, out, row)


@njit
def few(n_threads, layer, numbers, held, q, own, pieces, out):
    row = 4 * layer[plan.N_HEADS] * layer[plan.D_HEAD]
    for rank in range(n_threads):
        attention_few.attend(rank, n_threads, layer, numbers, held, n_threads, q, row, own, pieces, out, row)
    if memory.is_split(held[cells.N_FEW], layer[plan.N_KV], n_threads):
        attention_few.gather(0, 1, layer, held, pieces, own, out, row)


def attend(q, k, v, *, softcap=0.0, window=0, n_sinks=0, n_threads=2, by=run):
    """q (T, H, D) float32; k, v (G, P + T, D) float32 or bf16 -> (T, H, D), by ``run`` or ``few``."""
    (n_tokens, n_heads, d), (n_kv, n_keys, _) = q.shape, k.shape
    layer = np.zeros(plan.LAYER, np.int64)
    layer[[plan.N_HEADS, plan.N_KV, plan.D_HEAD, plan.WINDOW, plan.N_SINKS]] = n_heads, n_kv, d, window, n_sinks
    layer[plan.CACHE_FORMAT] = plan.BF16 if k.dtype == torch.bfloat16 else plan.FP32
    layer[[plan.K_CACHE, plan.V_CACHE]] = k.data_ptr(), v.data_ptr()
    layer[plan.HEAD_STRIDE] = k.stride(0) * k.itemsize
    numbers = np.array([d**-0.5, softcap], np.float32)
    held, out = np.zeros(cells.N_HELD, np.int64), torch.zeros_like(q)
    own = torch.full((memory.own_floats(layer[None]),), float("nan"))
    if by is run:
        panels = torch.full((memory.panel_bytes(layer[None], n_keys) // 4 + 32,), float("nan"))
        whole_lines = (panels.data_ptr() + 63) // 64 * 64
        run(n_threads, layer, numbers, held, q.data_ptr(), n_tokens, n_keys - n_tokens, own.data_ptr(), whole_lines,
            out.data_ptr())  # fmt: skip
        return out
    places = np.array([(n_keys - n_tokens + t, 0) for t in range(n_tokens)])
    which, n_tiles = np.arange(n_tokens), (n_keys - 1) // memory.TILE + 1
    held[[cells.TOKENS, cells.FEW]] = places.ctypes.data, which.ctypes.data
    held[[cells.N_FEW, cells.N_TILES]] = n_tokens, n_tiles
    pieces = torch.full((memory.piece_floats(layer[None], n_tokens, n_tiles, n_threads),), float("nan"))
    few(n_threads, layer, numbers, held, q.data_ptr(), own.data_ptr(), pieces.data_ptr(), out.data_ptr())
    return out


def oracle(q, k, v, *, softcap=0.0, window=0, n_sinks=0):
    (n_tokens, n_heads, d), (n_kv, n_keys, _) = q.shape, k.shape
    k, v = (t.double().repeat_interleave(n_heads // n_kv, dim=0) for t in (k, v))
    scores = torch.einsum("thd,hkd->htk", q.double(), k) * d**-0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position, key = torch.arange(n_keys - n_tokens, n_keys)[:, None], torch.arange(n_keys)
    seen = key <= position
    if window:
        seen &= (key > position - window) | (key < n_sinks)
    return torch.einsum("htk,hkd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


SHAPES = [(9, 3, 64), (4, 4, 8), (5, 1, 80), (2, 1, 128), (130, 1, 16)]
"""(query heads, key heads, width): the default model's; no whole panel; not whole ones; two; more rows than an item."""
SIGHTS = [{}, {"window": 50, "n_sinks": 4}, {"window": 200}, {"softcap": 3.0}]


def example(n_heads, n_kv, d, n_past, n_tokens):
    """Keys with channels far larger than the others, as trained models have, and one key that draws much attention."""
    torch.manual_seed(n_past + d)
    q = torch.randn(n_tokens, n_heads, d) * 2
    k, v = torch.randn(n_kv, n_past + n_tokens, d), torch.randn(n_kv, n_past + n_tokens, d)
    k[..., 1] *= 8
    k[:, 0] *= 3
    v[:, 0] *= 0.01
    return q, k, v


@pytest.mark.parametrize("sight", SIGHTS, ids=str)
@pytest.mark.parametrize(("n_past", "n_tokens"), [(0, 16), (0, 300), (141, 37)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_equals_float64s(shape, n_past, n_tokens, sight):
    q, k, v = example(*shape, n_past, n_tokens)
    for keys, values in ((k, v), (k.bfloat16(), v.bfloat16())):
        wanted = oracle(q, keys, values, **sight)
        got = attend(q, keys, values, **sight)
        assert (got.double() - wanted).abs().max() <= 2e-5 * wanted.abs().max()
        assert torch.equal(attend(q[-3:], keys, values, by=few, **sight), got[-3:])
        assert torch.equal(attend(q[-1:], keys, values, by=few, n_threads=9, **sight), got[-1:])


def test_what_no_token_sees_changes_nothing():
    q, k, v = example(4, 2, 32, 60, 40)
    clean = attend(q, k, v)
    k[:, 80], v[:, 90] = float("inf"), 1e4 * v[:, 90]
    damaged = attend(q, k, v)
    assert torch.equal(damaged[:20], clean[:20])
    assert not damaged[20:30].isfinite().any()


def test_exponentials_are_float32s():
    """Of what a softmax asks for, and far below it; NaN stays one."""

    @njit
    def exponentials(x, n):
        return rowwise.exponentials(x, n, np.float32(0.0))

    x = np.concatenate([np.linspace(-87, 0, 4096), np.linspace(-1, 88, 4096)]).astype(np.float32)
    y = x.copy()
    exponentials(y.ctypes.data, len(y))
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(y - exact) / exact).max() < 2.0**-22
    y = np.full(8, np.nan, np.float32)
    assert np.isnan(exponentials(y.ctypes.data, 8))
    assert np.isnan(y).all()
