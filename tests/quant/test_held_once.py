"""A packed linear that laid its codes out as panels holds them once, and is the same matrix."""

from __future__ import annotations

import pytest
import torch

from labkit.backends.lookup import PanelRows
from labkit.quant import RTN, W8A8, Int2, Int3, Int4, Int8, Stored, StoredLinear, block_groups
from labkit.quant.blocks import BLOCKS, anything

N, K = 48, 512
IDS = torch.tensor([5, 0, 47, 17, 5])
FORMS = [
    Int8(),
    W8A8(),
    Int4(64),
    Int4(32, symmetric=True),
    Int3(32),
    Int2(64),
    RTN(5, 32, "minimum"),
    RTN(6, 64, "symmetric"),
    RTN(8, 32),
    "Q4_1",
    "Q5_0",
    "Q8_0",
    "Q6_K",
]


def made(form):
    linear = torch.nn.Linear(K, N)
    if isinstance(form, str):
        return StoredLinear(form, anything(form, N, K), K, linear.bias)
    return form.layer("layers.0.ffn.up_proj", linear)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_panels_take_the_place_of_the_first_layout(form):
    torch.manual_seed(3)
    linear, x = made(form), torch.randn(2, K)
    with torch.inference_mode():
        before = linear.dequantize(), linear.rows(IDS), linear(x)
        n_bytes = sum(t.nbytes for t in linear.buffers())
        panels = linear.panels()
        assert linear.panels() is panels
        after = linear.dequantize(), linear.rows(IDS), linear(x)
    for one, two in zip(before, after, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-6, atol=1e-6)
    held = sum(t.nbytes for t in linear.buffers())
    assert held == panels.nbytes
    # float32 where a scale times 6 bits, or a zero point of 8 bits, is no float16
    assert held == n_bytes or (form in ("Q6_K", RTN(8, 32)) and held < 1.5 * n_bytes)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_tokens_row_is_read_out_of_the_panels(form):
    torch.manual_seed(4)
    linear = made(form)
    wanted = linear.rows(IDS)
    if form == W8A8():
        return  # no head rounds its tokens
    look_up = PanelRows(linear.panels())
    torch.testing.assert_close(torch.from_numpy(look_up(IDS.numpy(), rounded=False)), wanted, rtol=1e-6, atol=1e-6)
    rounded = torch.from_numpy(look_up(IDS.numpy(), rounded=True))
    assert torch.equal(rounded, rounded.bfloat16().float())
    torch.testing.assert_close(rounded, wanted.bfloat16().float(), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(("n_out", "n_in"), [(48, 512), (37, 256), (16, 768)])
@pytest.mark.parametrize("kind", list(block_groups.SIZES))
def test_the_bytes_of_blocks_are_predicted_before_and_after(kind, n_out, n_in):
    raw = anything(kind, n_out, n_in)
    scales = torch.rand(raw.view(-1, BLOCKS[kind][1]).shape[0], 1).half().view(torch.uint8)
    for at in (208,) if kind == "Q6_K" else (0, 2) if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,):
        raw.view(-1, BLOCKS[kind][1])[:, at : at + 2] = scales
    linear, said = StoredLinear(kind, raw, n_in), Stored(kind)
    assert linear.weight.nbytes == said.layer_nbytes(n_out, n_in)
    linear.panels()
    assert sum(t.nbytes for t in linear.buffers()) == said.compiled().layer_nbytes(n_out, n_in)


def test_every_format_with_a_product_has_its_sizes():
    assert set(block_groups.SIZES) == set(block_groups._PARTS)
