"""A packed linear that laid its codes out as panels holds them once, and is the same matrix."""

from __future__ import annotations

import pytest
import torch

from labkit.backends.lookup import PanelRows
from labkit.quant import RTN, W8A8, Int2, Int3, Int4, Int8, StoredLinear
from labkit.quant.blocks import anything

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
