"""Products of every form of weights: against float64, and the same bits for one token and for many."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from labkit.kernels import panel_layout
from labkit.kernels.cpu import linear, plan
from labkit.kernels.packed import round_tokens
from labkit.quant import W8A8, Int4, Int8, StoredLinear, blocks

FORMS = {
    "fp32": lambda plain: plain,
    "bf16": lambda plain: plain.to(torch.bfloat16),
    "int8": lambda plain: Int8().layer("", plain),
    "w8a8": lambda plain: W8A8().layer("", plain),
    "int4, groups of 32": lambda plain: Int4(32).layer("", plain),
    "int4, groups of 64": lambda plain: Int4(64).layer("", plain),
    "int4, groups of 128, symmetric": lambda plain: Int4(128, symmetric=True).layer("", plain),
    "Q4_1": lambda plain: StoredLinear("Q4_1", blocks.anything("Q4_1", *plain.weight.shape), plain.in_features),
    "Q6_K": lambda plain: StoredLinear("Q6_K", blocks.anything("Q6_K", len(plain.weight), 1280), 1280),
}
SHAPES = ((20, 1280, True), (50, 384, False), (7, 2432, False))
"""Rows that do not fill a panel; inputs of several pieces; few rows for many threads, so that tokens are cut."""


def multiply(row, x, bias=None, n_threads=2):
    with linear.compiled_products(n_threads):
        return linear.multiply(row, x, bias)


@pytest.mark.parametrize("form", FORMS)
def test_a_product_equals_float64s_and_is_the_same_at_every_count(form):
    for n_out, n_in, bias in SHAPES:
        module = FORMS[form](nn.Linear(n_in, n_out, bias=bias).requires_grad_(False))
        n_in = module.in_features
        x = torch.randn(61, n_in) * torch.logspace(-1, 1, n_in)
        dense = module.dequantize() if hasattr(module, "dequantize") else module.weight
        seen = round_tokens(x) if form == "w8a8" else x
        wanted = seen.double() @ dense.double().T + (0.0 if module.bias is None else module.bias.double())
        row = plan.describe(module)
        got = multiply(row, x, module.bias)
        tolerance = 1e-5 if form in ("fp32", "bf16", "w8a8") else 1e-4
        assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()
        for n in (1, 2, 3, 5, 8, 9, 30):
            for n_threads in (1, 3):
                assert torch.equal(multiply(row, x[:n], module.bias, n_threads), got[:n]), (n, n_threads)


def grids(bits, n_out, n_in, group):
    """Codes with each kind of offset, and the weights that they stand for, in float64."""
    torch.manual_seed(bits)
    codes = torch.randint(0, 2**bits, (n_out, n_in), dtype=torch.uint8)
    scales, minima = torch.rand(n_out, n_in // group).half() + 0.1, torch.randn(n_out, n_in // group).half()
    zeros = torch.randint(0, 2**bits, scales.shape, dtype=torch.uint8)
    for given in ({}, {"zeros": zeros}, {"minima": minima}, {"minima": minima.float() * 1.1}):
        s = scales.double().repeat_interleave(group, 1)
        if "minima" in given:
            low = given["minima"].double().repeat_interleave(group, 1)
        else:
            low = -s * given.get("zeros", torch.full_like(zeros, 2 ** (bits - 1))).repeat_interleave(group, 1).double()
        yield panel_layout.pack(codes, scales, bits=bits, **given), s * codes.double() + low


@pytest.mark.parametrize("group", [16, 32, 64, 256])
@pytest.mark.parametrize("bits", panel_layout.PLANES)
def test_any_grid_has_its_product(bits, group):
    """2 to 8 bits, groups of 16 to 256, zero points or minima: what files bring and methods choose."""
    for panels, dense in grids(bits, 37, 768, group):
        torch.testing.assert_close(panels.dequantize().double(), dense, rtol=1e-4, atol=1e-4)
        ids = torch.tensor([36, 0, 17, 36])
        assert torch.equal(panels.rows(ids), panels.dequantize()[ids])
        x = torch.randn(13, 768) * torch.logspace(-1, 1, 768)
        wanted, row = x.double() @ dense.T, plan.of_panels(panels)
        got = multiply(row, x)
        assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max()
        for n in (1, 2, 7):
            assert torch.equal(multiply(row, x[:n]), got[:n])


def test_inputs_that_do_not_fill_a_block_are_padded_with_nothing():
    for panels, dense in grids(4, 20, 104, 8 * 13):
        x = torch.randn(5, 104)
        wanted = x.double() @ dense.T
        assert (multiply(plan.of_panels(panels), x) - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_what_has_no_layout_says_so():
    codes = torch.zeros(16, 96, dtype=torch.uint8)
    with pytest.raises(ValueError, match="7 bits a weight have no compiled product"):
        panel_layout.pack(codes, torch.ones(16, 3), bits=7)
    with pytest.raises(ValueError, match="groups of 48 have no compiled product"):
        panel_layout.pack(codes, torch.ones(16, 2), bits=4)


def test_nothing_is_rounded_on_the_way():
    """Scales that float16 cannot hold stay in float32."""
    codes, scales = torch.zeros(16, 64, dtype=torch.uint8), torch.full((16, 1), 1 / 3)
    assert panel_layout.pack(codes, scales, bits=4).scales.dtype == torch.float32
    halves = panel_layout.pack(codes, torch.full((16, 2), 0.125), bits=4)
    assert halves.scales.dtype == torch.float16
    assert np.isclose(halves.nbytes, 16 * 64 / 2 + 2 * 16 * 2)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offsets", ["none", "minima"])
def test_scales_in_bfloat16_are_the_numbers_that_they_are(bits, offsets):
    """As some published files have them."""
    chance = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (20, 128), dtype=torch.uint8, generator=chance)
    scales, minima = torch.rand(2, 20, 4, generator=chance).bfloat16()
    wide = panel_layout.pack(codes, scales.float(), bits=bits, minima=minima.float() if offsets == "minima" else None)
    made = panel_layout.pack(codes, scales, bits=bits, minima=minima if offsets == "minima" else None)
    assert torch.equal(made.dequantize(), wide.dequantize())
