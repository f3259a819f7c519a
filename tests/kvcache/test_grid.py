"""Codes and grids: within half a step, never clipped, packed and unpacked without loss."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.kvcache import grid

numbers = st.lists(st.floats(-1e4, 1e4, width=32), min_size=16, max_size=16)


@settings(max_examples=200, deadline=None)
@given(numbers, st.sampled_from(("int8", "int4")))
def test_the_error_is_at_most_half_a_step(values, kind):
    x = torch.tensor(values)
    scale, zero = grid.make_grid(x.min(), x.max(), kind)
    codes = grid.encode(x, scale, zero, kind)
    rebuilt = codes.float() * scale.float() + zero.float()
    assert ((rebuilt - x).abs() <= scale.float() * 0.5001 + 1e-6 * x.abs()).all()


@settings(max_examples=100, deadline=None)
@given(numbers, st.sampled_from((("int8", 254), ("int4", 15))))
def test_the_grid_is_hardly_wider_than_the_numbers(values, kind_and_steps):
    """Rounding the grid to bf16 outwards costs at most a few per cent of its fineness."""
    kind, steps = kind_and_steps
    x = torch.tensor(values)
    scale, _ = grid.make_grid(x.min(), x.max(), kind)
    slack = 3 * x.abs().max() * 2.0**-7  # the zero's own rounding
    assert float(scale) * steps <= 1.02 * float(x.max() - x.min()) + float(slack) + 1e-17


@given(st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda codes: len(codes) % 2 == 0))
def test_packing_is_lossless(codes):
    packed = grid.pack(torch.tensor(codes, dtype=torch.uint8))
    assert packed.numel() == len(codes) // 2
    assert grid.unpack(packed).tolist() == codes


def test_keys_are_gridded_by_channel_and_values_by_token():
    """One huge key channel spoils no other; one huge value token spoils no other."""
    k = torch.randn(1, 64, 16)
    k[:, :, 3] *= 1000
    rebuilt = grid.dequantize_keys(*grid.quantize_keys(k, 32, "int8"), "int8")
    others = [d for d in range(16) if d != 3]
    assert (rebuilt - k)[:, :, others].abs().max() < 0.03
    v = torch.randn(1, 64, 16)
    v[:, 5] *= 1000
    rebuilt = grid.dequantize_values(*grid.quantize_values(v, 32, 1, "int8"), "int8")
    rows = [t for t in range(64) if t != 5]
    assert (rebuilt - v)[:, rows].abs().max() < 0.03


def test_shapes_and_layout():
    k = torch.arange(2 * 64 * 4, dtype=torch.float32).reshape(2, 64, 4)
    codes, scale, zero = grid.quantize_keys(k, 32, "int8")
    assert codes.shape == (2, 2, 4, 32)  # heads, groups, channels, tokens
    assert scale.shape == zero.shape == (2, 2, 4)
    assert codes[0, 0, 0].tolist() == sorted(codes[0, 0, 0].tolist())  # a channel's tokens lie side by side
    packed, _, _ = grid.quantize_keys(k, 32, "int4")
    assert packed.shape == (2, 2, 4, 16)
    codes, scale, _ = grid.quantize_values(k, 32, 2, "int4")
    assert codes.shape == (2, 2, 32, 2)
    assert scale.shape == (2, 2, 2, 32)
