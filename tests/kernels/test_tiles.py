"""Panels and tiles against numpy; also without this processor's instructions (``test_tiers`` has the others)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from labkit.kernels import panel_layout
from labkit.kernels.cpu import integer_tiles as it
from labkit.kernels.cpu import panels, tiers

SOURCES = {"nibbles": it.nibbles, "bytes": it.signed_bytes, "words": it.words, "unsigned": it.unsigned_bytes}


@pytest.mark.parametrize("tier", [it.TIER, tiers.PLAIN], ids=lambda tier: tier.name)
@pytest.mark.parametrize("source", SOURCES)
def test_an_integer_tile_is_exact(tier, source):
    """Three blocks of 32, the largest sums there can be among them, of either sign; written, then added to."""
    tile = it.make_tile(2, SOURCES[source], tier)

    @njit
    def run(panel, x, x_stride, steps, sums, scales, minima, out, fresh):
        tile(panel, 3, 4, x, x_stride, steps, sums, 1, scales, minima, 0, out, 64, fresh, panel, 1)

    rng, n = np.random.default_rng(5), 96
    of_bytes, bits = source == "unsigned", 4 if source == "nibbles" else 8
    top = 63 if of_bytes else 32767
    low, high = (0, 15) if bits == 4 else (-127, 127)
    w, q = rng.integers(low, high + 1, (16, n)), rng.integers(-top, top + 1, (2, n))
    w[0], w[1], q[0] = high, low, top
    packed = panel_layout._pack((w & 255).astype(np.uint8), bits).numpy()[0, : n // 8]
    order = np.arange(n) if of_bytes else np.arange(n).reshape(-1, 8)[:, [0, 2, 1, 3, 4, 6, 5, 7]].ravel()
    if source == "words":
        packed = w[:, order].astype(np.int16).reshape(16, n // 2, 2).transpose(1, 0, 2)
    packed = np.ascontiguousarray(packed ^ 128 if of_bytes else packed)
    x = np.ascontiguousarray(q[:, order].astype(np.int8 if of_bytes else np.int16))
    record = np.zeros((2, 256), np.uint8)  # codes, then steps of 64, then a sum a block of 32
    record[:, : x[0].nbytes] = x.view(np.uint8).reshape(2, -1)
    steps, sums = rng.random((2, 2), np.float32), rng.random((2, 3), np.float32)
    record[:, 208:216] = steps.view(np.uint8)
    blocks = q.reshape(2, 3, 32)
    record[:, 224:236] = (-128 * blocks.sum(2)).astype(np.int32).view(np.uint8) if of_bytes else sums.view(np.uint8)
    scales, minima = rng.random((3, 16), np.float32), rng.random((3, 16), np.float32) * np.float32(1e6)
    exact = np.zeros((2, 16), np.float32)
    for block in range(3):  # the contract, step by step in float32
        whole = (blocks[:, block] @ w.reshape(16, 3, 32)[:, block].T).astype(np.float32)
        factor = steps[:, block // 2, None] * scales[block]
        exact = (whole.astype(float) * factor.astype(float) + exact.astype(float)).astype(np.float32)
        if not of_bytes:
            low_ = minima[block].astype(float) * sums[:, block, None].astype(float)
            exact = (low_ + exact.astype(float)).astype(np.float32)
    out, at = np.zeros((2, 16), np.float32), record.ctypes.data
    given = (at, 256, at + 208, at + 224, scales.ctypes.data, 0 if of_bytes else minima.ctypes.data, out.ctypes.data)
    run(packed.ctypes.data, *given, 1)
    np.testing.assert_allclose(out, exact, rtol=3e-7)
    first = out.copy()
    run(packed.ctypes.data, *given, 0)
    np.testing.assert_allclose(out, 2 * first, rtol=1e-6)


@pytest.mark.parametrize("last", [15, 9, 4])
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_a_panel_holds_rows_word_by_word(kind, last):
    pack = getattr(panels, f"pack_{kind}")

    @njit
    def run(w, stride, n, out):
        for half in range(2):
            pack(w, stride, last, n, half, out)

    rows = (torch.randn(last + 1, 96) * 30).to({"fp32": torch.float32, "bf16": torch.bfloat16}[kind])
    wanted, out = rows.float()[[min(r, last) for r in range(16)]], torch.zeros(96, 16)
    run(rows.data_ptr(), rows.stride(0) * rows.itemsize, 96, out.data_ptr())
    assert torch.equal(out, wanted.T)
