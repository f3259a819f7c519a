"""A prompt's attention over panels, as float32 and as integers, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from labkit.kernels.cpu import attention_panels, attention_run, memory, plan, rowwise


@njit
def run(n_threads, layer, numbers, q, n_tokens, n_past, integers, own, panels, out):
    row = 4 * layer[plan.N_HEADS] * layer[plan.D_HEAD]
    for rank in range(n_threads):
        attention_panels.make(rank, n_threads, layer, n_past, n_tokens, 0, integers, own, panels)
    for rank in range(n_threads):
        attention_run.attend(
            rank, n_threads, layer, numbers, q, row, n_tokens, n_past, integers, panels, own, out, row
        )  # fmt: skip


def attend(q, k, v, *, integers, softcap=0.0, window=0, n_sinks=0, n_threads=2):
    """q (T, H, D) float32; k, v (G, P + T, D) float32 or bf16 -> (T, H, D)."""
    (n_tokens, n_heads, d), (n_kv, n_keys, _) = q.shape, k.shape
    layer = np.zeros(plan.LAYER, np.int64)
    layer[[plan.N_HEADS, plan.N_KV, plan.D_HEAD, plan.WINDOW, plan.N_SINKS]] = n_heads, n_kv, d, window, n_sinks
    layer[plan.CACHE_FORMAT] = plan.BF16 if k.dtype == torch.bfloat16 else plan.FP32
    layer[[plan.K_CACHE, plan.V_CACHE]] = k.data_ptr(), v.data_ptr()
    layer[plan.HEAD_STRIDE] = k.stride(0) * k.itemsize
    numbers = np.array([d**-0.5, softcap], np.float32)
    own = torch.full((int(memory.own_floats(d, n_heads // n_kv)),), float("nan"))
    n_bytes = int(memory.all_bytes(n_keys, n_kv, d))
    panels, out = torch.full((n_bytes // 4 + 32,), float("nan")), torch.zeros_like(q)
    whole_lines = (panels.data_ptr() + 63) // 64 * 64
    run(n_threads, layer, numbers, q.data_ptr(), n_tokens, n_keys - n_tokens, integers, own.data_ptr(), whole_lines,
        out.data_ptr())  # fmt: skip
    return out.double()


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
    wanted = oracle(q, k, v, **sight)
    assert (attend(q, k, v, integers=False, **sight) - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    short_k, short_v = k.bfloat16(), v.bfloat16()
    wanted = oracle(q, short_k, short_v, **sight)
    got = attend(q, short_k, short_v, integers=False, **sight)
    assert (got - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("sight", SIGHTS, ids=str)
@pytest.mark.parametrize(("n_past", "n_tokens"), [(0, 16), (0, 300), (141, 37)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_lose_less_than_bf16_has_lost(shape, n_past, n_tokens, sight):
    q, k, v = example(*shape, n_past, n_tokens)
    short_k, short_v = k.bfloat16(), v.bfloat16()
    stored = oracle(q, short_k, short_v, **sight)
    lost = (stored - oracle(q, k, v, **sight)).square().mean().sqrt()
    assert (attend(q, short_k, short_v, integers=True, **sight) - stored).square().mean().sqrt() < lost


@pytest.mark.parametrize("of", ["k", "v"])
def test_what_no_token_sees_changes_nothing(of):
    """Neither a later key's size, which its tile's steps must not know of, nor one that is not a number."""
    q, k, v = (t.bfloat16() if t.dim() == 3 and i else t for i, t in enumerate(example(4, 2, 32, 60, 40)))
    clean = attend(q, k, v, integers=True)
    (k if of == "k" else v)[:, 80] = float("nan")
    (k if of == "k" else v)[:, 90] *= 1e4
    damaged = attend(q, k, v, integers=True)
    assert torch.equal(damaged[:20], clean[:20])
    assert not damaged[20:].isfinite().any()


def test_values_of_zero_that_no_token_sees_weigh_nothing():
    """What a sliding cache has let go stands as zeros: a weight is divided by its value's step."""
    q, k, v = (t.bfloat16() if i else t for i, t in enumerate(example(4, 2, 32, 250, 40)))
    sight = {"window": 45, "n_sinks": 4}
    kept = attend(q, k, v, integers=True, **sight)
    k[:, 4:200], v[:, 4:200] = 0.0, 0.0
    assert torch.equal(attend(q, k, v, integers=True, **sight), kept)


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
