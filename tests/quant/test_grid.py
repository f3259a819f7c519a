"""Rounding and packing: error bounds, round trips, and a hand-packed block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.quant import grid
from labkit.quant.linear import Int4Linear, Int8Linear


def test_int8_error_is_at_most_half_a_step():
    weight = torch.randn(50, 70)
    q, scales = grid.round_int8(weight)
    assert q.dtype == torch.int8
    assert int(q.abs().max()) == 127
    assert ((q * scales[:, None] - weight).abs() <= scales[:, None] * 0.5001).all()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int4_error_is_at_most_half_a_step(group_size, symmetric):
    weight = torch.randn(20, 256) + 0.3
    q, scales, zeros = grid.round_int4(weight, group_size, symmetric=symmetric)
    offset = torch.full_like(scales, 8.0, dtype=torch.float32) if zeros is None else zeros.float()
    s = scales.float().repeat_interleave(group_size, 1)
    back = s * (q.float() - offset.repeat_interleave(group_size, 1))
    # The zero point is a whole number too, so an asymmetric grid may be shifted by half a step against the range.
    assert ((back - weight).abs() <= s * (0.51 if symmetric else 1.01)).all()


def test_a_zero_group_stays_zero():
    q, scales, zeros = grid.round_int4(torch.zeros(4, 64), 64, symmetric=False)
    assert not (scales.float() * (q.float().unflatten(1, (1, 64)).mean(-1) - zeros.float())).any()
    linear = Int8Linear(*grid.round_int8(torch.zeros(4, 64)))
    assert not linear.dequantize().any()


def test_a_block_packed_by_hand():
    q = torch.arange(64).remainder(16)[None].to(torch.uint8)
    packed, _, _ = grid.pack_int4(q, torch.ones(1, 1, dtype=torch.float16), None)
    words = packed[0, 0, 0].numpy().view("<u2")
    assert words[3] == 3 | 3 << 4 | 3 << 8 | 3 << 12  # weights 3, 19, 35, 51
    q[0, 16 + 5] = 9
    packed, _, _ = grid.pack_int4(q, torch.ones(1, 1, dtype=torch.float16), None)
    assert packed[0, 0, 0].numpy().view("<u2")[5] == 5 | 9 << 4 | 5 << 8 | 5 << 12


@settings(max_examples=25, deadline=None)
@given(n_out=st.integers(1, 13), n_groups=st.integers(1, 5), group=st.sampled_from([32, 64, 128]), zeros=st.booleans())
def test_packing_is_undone_by_unpacking(n_out, n_groups, group, zeros):
    rng = np.random.default_rng(n_out * 31 + n_groups)
    q = torch.from_numpy(rng.integers(0, 16, (n_out, n_groups * group), dtype=np.uint8))
    scales = torch.from_numpy(rng.uniform(0.01, 1, (n_out, n_groups)).astype(np.float16))
    zero = torch.from_numpy(rng.integers(0, 17, (n_out, n_groups), dtype=np.uint8)) if zeros else None
    packed, s, _ = grid.pack_int4(q, scales, zero)
    weights, cells = grid.packed_shapes(n_out, n_groups * group, group)
    assert (packed.shape, s.shape) == (weights, cells)
    assert torch.equal(grid.unpack_int4(packed, n_out, n_groups * group), q)
    assert torch.equal(grid.unpack_groups(s, n_out, n_groups), scales)
    linear = Int4Linear(q, scales, zero)
    offset = 8.0 if zero is None else zero.float().repeat_interleave(group, 1)
    wanted = scales.float().repeat_interleave(group, 1) * (q.float() - offset)
    assert torch.equal(linear.dequantize(), wanted)
    ids = torch.tensor([0, n_out - 1, 0])
    assert torch.equal(linear.rows(ids), wanted[ids])
    x = torch.randn(3, n_groups * group)
    torch.testing.assert_close(linear(x), x @ wanted.T, rtol=1e-4, atol=1e-4)


def test_a_group_that_does_not_divide_names_those_that_do():
    with pytest.raises(ValueError, match="do not divide a layer's 576 inputs: choose group_size=32 or 64"):
        grid.round_int4(torch.zeros(1, 576), 128, symmetric=True)
    with pytest.raises(ValueError, match="use weights='int8'"):
        grid.round_int4(torch.zeros(1, 40), 32, symmetric=True)


def test_scales_beyond_float16_are_refused():
    with pytest.raises(ValueError, match="too large for a float16 scale"):
        grid.round_int4(torch.full((1, 32), 1e6), 32, symmetric=True)
