"""Packed forms beside independent code: bits counted in Python's integers, grids in numpy's float64, blocks by gguf."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from labkit import registry
from labkit.quant import (
    RTN,
    Grid,
    GroupLinear,
    Int2,
    Int3,
    Int4,
    Stored,
    StoredLinear,
    block_groups,
    form_of,
    format_of,
    planes,
)
from labkit.quant.blocks import BLOCKS, not_finite

HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
          "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,)}  # fmt: skip


def any_blocks(kind: str, n_out: int, n_in: int) -> torch.Tensor:
    """Random bytes with scales of moderate size."""
    values, n_bytes = BLOCKS[kind]
    rng = np.random.default_rng(len(kind) + n_in)
    raw = rng.integers(0, 256, (n_out * n_in // values, n_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        raw[:, at : at + 2] = rng.normal(0, 0.02, (len(raw), 1)).astype(np.float16).view(np.uint8)
    return torch.from_numpy(raw.reshape(n_out, -1))


def bits_of(packed: torch.Tensor, n_in: int, bits: int) -> list[int]:
    """A row's codes, read bit by bit as the docstring of ``planes`` says."""
    data, n_blocks = packed.tolist(), -(-n_in // 32)
    codes, at, shift = [0] * (n_blocks * 32), 0, 0
    for width in planes.PLANES[bits]:
        for block in range(n_blocks):
            for k in range(32):
                byte, turn = k % (4 * width), k // (4 * width)
                value = data[at + block * 4 * width + byte] >> (turn * width) & (2**width - 1)
                codes[32 * block + k] |= value << shift
        at, shift = at + n_blocks * 4 * width, shift + width
    return codes[:n_in]


@settings(max_examples=30, deadline=None)
@given(bits=st.sampled_from(list(planes.PLANES)), n_in=st.integers(1, 150), seed=st.integers(0, 999))
def test_planes_hold_every_code_in_its_true_number_of_bits(bits, n_in, seed):
    codes = torch.from_numpy(np.random.default_rng(seed).integers(0, 2**bits, (3, n_in), dtype=np.uint8))
    packed = planes.pack(codes, bits)
    assert packed.shape == (3, planes.row_nbytes(n_in, bits))
    assert planes.row_nbytes(n_in, bits) * 8 == -(-n_in // 32) * 32 * bits
    assert bits_of(packed[1], n_in, bits) == codes[1].tolist()
    assert torch.equal(planes.unpack(packed, n_in, bits), codes)


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric", "minimum"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounding_to_nearest_agrees_with_float64(bits, kind):
    """The oracle tries every point of the grid that the stored scales span, and takes the closest."""
    torch.manual_seed(bits)
    weight = torch.randn(6, 128) * 0.05 + 0.01
    found = Grid(bits, kind).nearest(weight, 32)
    w = weight.double().numpy().reshape(6, 4, 32)
    low, high, top = w.min(-1), w.max(-1), 2**bits - 1
    if kind == "symmetric":
        scale, base = np.abs(w).max(-1) / (top / 2), None
        points = np.arange(top + 1) - 2 ** (bits - 1)
    elif kind == "minimum":
        scale, base = (high - low) / top, low.astype(np.float16).astype(np.float64)
        points = np.arange(top + 1)
    else:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scale, base = (high - low) / top, None
        points = np.arange(top + 1)
    scale = scale.astype(np.float16).astype(np.float64)
    assert np.array_equal(found.scales.double().numpy(), scale)
    grid = scale[..., None] * points if base is None else scale[..., None] * points + base[..., None]
    if kind == "asymmetric":
        zeros = np.round(-low / scale)
        assert np.array_equal(found.zeros.double().numpy(), zeros)
        grid = scale[..., None] * (points - zeros[..., None])
    best = np.abs(w[..., None] - grid[:, :, None, :]).min(-1)
    error = np.abs(found.dequantize().double().numpy().reshape(w.shape) - w)
    np.testing.assert_allclose(error, best, atol=1e-7)


@pytest.mark.parametrize("kind", list(HALVES))
def test_stored_blocks_are_what_gguf_says(kind):
    raw = any_blocks(kind, 6, 512)
    linear = StoredLinear(kind, raw, 512, torch.randn(6))
    wanted = torch.from_numpy(gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]))
    assert torch.equal(linear.dequantize(), wanted)
    assert torch.equal(linear.rows(torch.tensor([5, 0])), wanted[[5, 0]])
    assert linear.weight.nbytes == raw.nbytes
    x = torch.randn(3, 512)
    torch.testing.assert_close(linear(x), x @ wanted.T + linear.bias, rtol=1e-4, atol=1e-4)
    if kind not in ("Q2_K", "Q3_K"):
        parts = linear.groups()
        assert int(parts.codes.max()) < 2**parts.bits
        assert torch.equal(parts.dequantize(), wanted)
        before = sum(t.nbytes for t in linear.buffers())
        linear.panels()  # what a compiled step computes from: the blocks are let go
        after = sum(t.nbytes for t in linear.buffers())
        assert after <= before * 16 / 6 + 16 * 512 / 32 * 8  # 6 rows in a panel of 16; K-quants' scales in float32
        torch.testing.assert_close(linear.dequantize(), wanted, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(linear.rows(torch.tensor([5, 0])), wanted[[5, 0]], rtol=1e-6, atol=1e-6)
    else:
        assert "no compiled product" in str(linear.why_not_compiled)


@pytest.mark.parametrize("kind", list(block_groups._PARTS))
def test_a_gpus_arithmetic_on_blocks_is_the_processors(kind):
    blocks = any_blocks(kind, 6, 512).view(-1, BLOCKS[kind][1])
    bits, *found = block_groups._PARTS[kind](blocks)  # a tensor stays one, wherever it lies
    same_bits, *wanted = block_groups._PARTS[kind](blocks.numpy())
    assert bits == same_bits
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one.dtype.is_floating_point, one.tolist()) == (other.dtype.kind == "f", other.tolist())


def test_a_damaged_scale_is_seen():
    raw = any_blocks("Q4_1", 4, 64)
    assert not not_finite(raw, "Q4_1")
    raw[2, 22:24] = torch.tensor([float("nan")], dtype=torch.float16).view(torch.uint8)
    assert not_finite(raw, "Q4_1")


FORMS = [Int3(32), Int2(32), RTN(5, 32, "minimum"), RTN(8, 64), RTN(4, 32, "minimum")]


@pytest.mark.parametrize("config", FORMS, ids=repr)
def test_the_bytes_of_a_form_are_as_said(config):
    linear = nn.Linear(192, 21, bias=False)
    made = config.layer("x", linear)
    held = sum(t.nbytes for t in made.buffers())
    assert held == config.layer_nbytes(21, 192)
    assert held < linear.weight.nbytes * (config.bits + 1.01) / 32
    assert isinstance(made, GroupLinear)
    ids = torch.tensor([20, 3])
    assert torch.equal(made.rows(ids), made.dequantize()[ids])
    assert made.why_not_compiled is None
    assert GroupLinear(made.groups(), order=torch.randperm(192)).why_not_compiled


def test_columns_that_a_file_sorted_find_their_inputs():
    torch.manual_seed(0)
    groups, order = Grid(3).nearest(torch.randn(5, 64), 32), torch.randperm(64)
    linear = GroupLinear(groups, order=order)
    wanted = torch.zeros(5, 64)
    for k, at in enumerate(order.tolist()):
        wanted[:, at] = groups.dequantize()[:, k]
    assert torch.equal(linear.dequantize(), wanted)
    assert torch.equal(linear.rows(torch.tensor([4])), wanted[4:])


def test_a_forecast_measures_a_form_and_names_are_kept_as_far_as_they_tell_all():
    assert form_of(RTN(4, 64)) == "int4"
    assert form_of(RTN(3, 32)) == Int3(32)
    assert form_of(RTN(4, 32, "minimum")) == RTN(4, 32, "minimum")
    assert (form_of("plain"), form_of(None)) == (None, None)
    assert registry.named("weights", Int4()) == "int4"
    assert registry.label("weights", Int4(32)) == "int4, group_size=32"
    assert format_of(Int4(32)).bits_a_weight() == 4 + 24 / 32


def test_a_stored_format_counts_each_linear_in_its_own():
    config = Stored("Q4_1", "Q8_0", others=(("layers.1.ffn.down_proj", "Q6_K"), ("layers.0.ffn.up_proj", "plain")))
    assert config.layer_nbytes(4, 256, "layers.0.ffn.down_proj.weight") == 4 * 256 // 32 * 20
    assert config.layer_nbytes(4, 256, "layers.1.ffn.down_proj.weight") == 4 * 210
    assert config.layer_nbytes(4, 256, "layers.0.ffn.up_proj.weight") is None
    with pytest.raises(ValueError, match="Q6_K packs 256 weights a block, which does not divide a layer's 576 inputs"):
        config.layer_nbytes(4, 576, "layers.1.ffn.down_proj.weight")
