"""Panels, tiles and the product they make, against numpy and float64; also without this processor's instructions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit
from torch import nn

from labkit.kernels.cpu import attention_panels, linear, panels, plan, simd, tiles
from labkit.kernels.cpu.rowwise import LEVELS
from labkit.kernels.packed import round_tokens
from labkit.quant import Int4, rtn


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("of_bytes", [False, True])
@pytest.mark.parametrize(("n_words", "block_words"), [(32, 16), (40, 16), (8, 16)])
def test_an_integer_tile_is_exact(monkeypatch, portable, of_bytes, n_words, block_words):
    """In blocks that the words fill, or not; the largest sums there can be, of either sign."""
    if portable:  # what an ARM processor gets
        monkeypatch.setattr(simd, "HAS_AVX2", False)
    tile = tiles.make_integers(2, of_bytes=of_bytes)

    @njit
    def run(panel, x, x_stride, grid, grid_stride, starts, steps, steps_stride, out, fresh):
        tile(panel, x, x_stride, n_words, block_words, grid, grid_stride, starts, steps, steps_stride, 0, out, 64,
             fresh, panel, 0, 0, 6)  # fmt: skip

    rng, each = np.random.default_rng(n_words), 4 if of_bytes else 2
    kind, top, n = (np.int8, 63, 4 * n_words) if of_bytes else (np.int16, 32767, 2 * n_words)
    n_blocks = -(-n_words // block_words)
    w, q = rng.integers(-127, 128, (16, n)), rng.integers(-top, top + 1, (2, n))
    w[0], w[1], q[0] = 127, -127, top
    grid = rng.random((1 if of_bytes else n_blocks, 16), np.float32)
    steps = rng.random((2, n_blocks), np.float32)
    stored = (w + 128).astype(np.uint8) if of_bytes else w.astype(np.int16)
    panel = np.ascontiguousarray(stored.reshape(16, n_words, each).transpose(1, 0, 2))
    x, out = q.astype(kind), np.zeros((2, 16), np.float32)
    exact, taken_off = np.zeros((2, 16)), np.zeros(2, np.float32)
    for block in range(n_blocks):
        some = slice(block * block_words * each, (block + 1) * block_words * each)
        product = (q[:, some] @ w[:, some].T).astype(np.float64) * steps[:, block, None]
        exact += product * grid[0 if of_bytes else block]
        taken_off -= 128 * q[:, some].sum(1) * steps[:, block]
    arrays = (panel, x, grid, taken_off, steps, out)
    at, x_at, grid_at, starts_at, steps_at, out_at = (a.ctypes.data for a in arrays)
    grid_stride = 0 if of_bytes else 64
    # Written, then added to: only the first of a token's panels takes off what all of them have too much.
    left = -taken_off[:, None] * grid[0] if of_bytes else 0.0
    for fresh, wanted in ((1, exact), (0, 2 * exact + left)):
        run(at, x_at, x.strides[0], grid_at, grid_stride, starts_at, steps_at, steps.strides[0], out_at, fresh)
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("n", [16, 64, 100, 128])
def test_a_tile_of_pairs_is_exact(monkeypatch, portable, n):
    """The largest sums that an int32 holds among them; written, then added to."""
    if portable:
        monkeypatch.setattr(simd, "HAS_AVX2", False)

    @njit
    def run(panel, x, x_stride, grid, bias, steps, out, fresh):
        tiles.pairs_6(panel, x, x_stride, n // 2, grid, bias, steps, out, 64, fresh)

    rng, top = np.random.default_rng(n), int(attention_panels.levels.py_func(n))
    w, q = rng.integers(-top, top + 1, (16, n)), rng.integers(-(2**LEVELS), 2**LEVELS + 1, (6, n))
    w[0], w[1], q[0] = top, -top, 2**LEVELS
    grid, bias, steps = rng.random(16, np.float32), rng.random(16, np.float32) * 1e8, rng.random(6, np.float32)
    bias, out = bias.astype(np.float32), np.zeros((6, 16), np.float32)
    panel = np.ascontiguousarray(w.astype(np.int16).reshape(16, n // 2, 2).transpose(1, 0, 2))
    x, exact = q.astype(np.int16), (q @ w.T) * grid.astype(float) * steps[:, None].astype(float) + bias
    at = [a.ctypes.data for a in (panel, x)] + [x.strides[0]] + [a.ctypes.data for a in (grid, bias, steps, out)]
    for fresh, times in ((1, 1), (0, 2)):
        run(*at, fresh)
        np.testing.assert_allclose(out, times * exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("last", [15, 9, 4])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "bytes"])
def test_a_panel_holds_rows_word_by_word(kind, last):
    pack = getattr(panels, f"pack_{kind}")

    @njit
    def run(w, stride, n, out):
        for half in range(2):
            pack(w, stride, last, n, half, out)

    numbers = torch.randn(last + 1, 96) * 30
    rows = {"fp32": numbers, "bf16": numbers.bfloat16()}.get(kind, numbers.to(torch.int8))
    wanted = {"int8": rows.short(), "bytes": rows.short() + 128}.get(kind, rows.float())
    wanted = wanted[[min(r, last) for r in range(16)]].to(torch.uint8 if kind == "bytes" else wanted.dtype)
    each = {"int8": 2, "bytes": 4}.get(kind, 1)
    out = torch.zeros(96 // each, 16, each, dtype=wanted.dtype)
    run(rows.data_ptr(), rows.stride(0) * rows.itemsize, 96, out.data_ptr())
    assert torch.equal(out, wanted.unflatten(1, (-1, each)).transpose(0, 1))


FORMS = {
    "fp32": lambda plain: plain,
    "bf16": lambda plain: plain.to(torch.bfloat16),
    "int8": rtn.to_int8,
    "w8a8": rtn.to_w8a8,
    "int4, groups of 32": lambda plain: rtn.to_int4(plain, Int4(32)),
    "int4, groups of 64": lambda plain: rtn.to_int4(plain, Int4(64)),
    "int4, groups of 128, symmetric": lambda plain: rtn.to_int4(plain, Int4(128, symmetric=True)),
}


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("n_tokens", [2, 5, 7, 16, 61])
@pytest.mark.parametrize("form", FORMS)
def test_products_of_any_shape_equal_float64s(form, n_tokens, n_threads):
    """Rows that do not fill a panel; inputs of several panels; few rows for many threads, so that tokens are cut."""
    for n_out, n_in, bias in ((20, 1280, True), (50, 384, False), (7, 2432, False)):
        module = FORMS[form](nn.Linear(n_in, n_out, bias=bias).requires_grad_(False))
        x = torch.randn(n_tokens, n_in) * torch.logspace(-1, 1, n_in)
        dense = module.dequantize() if hasattr(module, "dequantize") else module.weight
        seen = round_tokens(x) if form == "w8a8" else x
        wanted = seen.double() @ dense.double().T + (0.0 if module.bias is None else module.bias.double())
        with linear.compiled_products(n_threads):
            got = linear.multiply(plan.describe(module), x, module.bias)
        tolerance = 1e-3 if form == "w8a8" else 1e-4 if form.startswith("int") else 1e-5
        assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()
