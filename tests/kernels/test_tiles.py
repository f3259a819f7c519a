"""Integer tiles equal numpy's integers, with this processor's instructions and with the portable ones."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from labkit.kernels.cpu import simd, tiles


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("of_bytes", [False, True])
@pytest.mark.parametrize("n", [32, 96])
def test_an_integer_tile_is_exact(monkeypatch, portable, of_bytes, n):
    if portable:  # what an ARM processor gets
        monkeypatch.setattr(simd, "HAS_AVX2", False)
    tile = tiles.make_tile_integer(2, of_bytes=of_bytes)

    @njit
    def run(w, x, x_stride, n, scales, sums, steps, out, out_stride):
        tile(w, x, x_stride, n, scales, sums, steps, out, out_stride, w)

    rng = np.random.default_rng(n)
    kind, top = (np.int8, 63) if of_bytes else (np.int16, 2000)
    w = rng.integers(-127, 128, (4, n)).astype(kind)
    q = rng.integers(-top, top + 1, (2, n))
    w[0], q[0] = 127, top  # the largest sums there can be, of either sign
    w[1] = -127
    scales, steps = rng.random(4, np.float32), rng.random(2, np.float32)
    sums, out = w.sum(1, dtype=np.int32), np.zeros((2, 4), np.float32)
    x = (q + tiles.TOKEN_OFFSET).astype(np.uint8) if of_bytes else q.astype(np.int16)
    arrays = (w, x), (scales, sums, steps, out)
    (w_at, x_at), (scales_at, sums_at, steps_at, out_at) = ([a.ctypes.data for a in some] for some in arrays)
    run(w_at, x_at, x.strides[0], n, scales_at, sums_at, steps_at, out_at, out.strides[0])
    exact = (q @ w.astype(np.int64).T).astype(np.float32)
    np.testing.assert_array_equal(out, exact * scales * steps[:, None])
