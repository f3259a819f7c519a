"""A packed linear that laid its codes out as panels holds them once, and is the same matrix."""

from __future__ import annotations

import pytest
import torch

from labkit.backends.lookup import PanelRows
from labkit.quant import GPTQ, RTN, W8A8, Int2, Int3, Int4, Int8, Packed, Stored, StoredLinear, block_groups
from labkit.quant.blocks import BLOCKS, anything
from labkit.quant.grid import KINDS

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


@pytest.mark.parametrize(("n_out", "n_in"), [(48, 512), (37, 256), (16, 768)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bits", "group"), [(8, 32), (8, 64), (8, 128), (6, 32), (5, 64), (3, 128)])
def test_the_bytes_of_groups_are_predicted_before_and_after(bits, group, kind, n_out, n_in):
    torch.manual_seed(5)
    said, plain = RTN(bits, group, kind), torch.nn.Linear(n_in, n_out, bias=False)
    linear, head = said.layer("layers.0.ffn.up_proj", plain), said.top(plain)
    for made, before, after in (
        (linear, said.layer_nbytes, said.compiled().layer_nbytes),
        (head, said.top_nbytes, said.compiled().top_nbytes),
    ):
        assert held(made) == before(n_out, n_in)
        made.panels()
        assert held(made) == after(n_out, n_in)
    if kind == "minimum":
        return  # ggml's: neither a method nor a file of these packings has it
    assert GPTQ(bits, group, kind, head="same").compiled().layer_nbytes(n_out, n_in) == held(linear)
    assert Packed(bits, group, kind).compiled().layer_nbytes(n_out, n_in) == held(linear)


@pytest.mark.parametrize("form", [Int4(64), Int4(32, True), Int3(128), Int2(64, head="int2")], ids=str)
def test_the_bytes_of_the_menus_grids_are_predicted(form):
    linear = form.layer("layers.0.ffn.up_proj", torch.nn.Linear(256, 37, bias=False))
    assert held(linear) == form.layer_nbytes(37, 256)
    linear.panels()
    assert held(linear) == form.compiled().layer_nbytes(37, 256)


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_the_bytes_of_rows_in_eight_bits_are_predicted(kind):
    """A file's 8 bits with one scale, and zero point, for a whole row."""
    torch.manual_seed(6)
    said = Packed(8, 0, kind)
    linear = said.layer("layers.0.ffn.up_proj", torch.nn.Linear(320, 37, bias=False))
    assert held(linear) == said.layer_nbytes(37, 320)
    linear.panels()
    assert held(linear) == said.compiled().layer_nbytes(37, 320)


def held(linear):
    return sum(t.nbytes for t in linear.buffers())
