"""Cases of ``triton_cases``: ggml's blocks, every format, against float64 products of what the gguf package unpacks."""

from __future__ import annotations

import gguf
import pytest
import torch
import torch.nn.functional as F

from labkit.kernels.triton import many, product, sampling, unpack
from labkit.kernels.triton.product import Matrix
from labkit.model.config import Norm
from labkit.model.norm import RMSNorm
from labkit.quant import StoredLinear, block_groups, blocks
from labkit.quant.linear import Int8Linear

KINDS = list(block_groups.SIZES)
WIDTHS = {32: (96, 1120), 256: (256, 1280)}
"""Inputs by a block's weights: one turn and several; whole blocks that are no multiple of 64, or of a tile."""
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of the largest result: float32 sums and one rounding of what comes out."""


def stored(kind, n_out, n_in, device):
    """A linear with a bias whose scales and minima are random, and its matrix float64 (N, K)."""
    raw = blocks.anything(kind, n_out, n_in)
    found = raw.view(-1, blocks.BLOCKS[kind][1])
    for at in blocks._HALVES[kind]:
        found[:, at : at + 2] = (torch.randn(len(found), 1) / 50).half().view(torch.uint8)
    dense = torch.from_numpy(gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind])).double()
    return StoredLinear(kind, raw, n_in, torch.randn(n_out)).to(device), dense


def wide(tensor):
    return tensor.cpu().double()


def near(got, wanted, also=1.0):
    """Within the rounding of got's dtype, counted from the largest number."""
    assert got.isfinite().all()
    off, largest = float((wide(got) - wanted).abs().max()), float(wanted.abs().max())
    assert off <= TOLERANCE[got.dtype] * also * largest, (off, largest, got.dtype)


def normed(norm, x):
    """The norm in float64."""
    gain = wide(norm.weight) + (1.0 if norm.unit_offset else 0.0)
    return wide(x) / (wide(x).square().mean(-1, keepdim=True) + norm.eps).sqrt() * gain


def empty(*shape, like):
    return torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)


def blocks_few(device):
    """Two tokens, added to a residual, behind a norm into two matrices: rows that are no multiple of a tile."""
    for kind in KINDS:
        for n_in in WIDTHS[blocks.BLOCKS[kind][0]]:
            norm = RMSNorm(n_in, Norm(eps=1e-5, unit_offset=n_in < 300)).to(device)
            norm.weight.normal_()
            (one, dense), (two, dense_two) = (stored(kind, n_out, n_in, device) for n_out in (5, 3))
            matrices = [Matrix.of(one), Matrix.of(two)]
            for dtype in TOLERANCE:
                x, residual = (torch.randn(2, n, device=device).to(dtype) for n in (n_in, 5))
                wanted = F.linear(wide(x), dense, wide(one.bias))
                near(unpack.linear(matrices[0], x), wanted)
                added = product.project(x, matrices[:1], residual.clone(), residual=residual)
                near(added, wanted + wide(residual))
                y = normed(norm, x)
                both = [F.linear(y, dense, wide(one.bias)), F.linear(y, dense_two, wide(two.bias))]
                near(product.project(x, matrices, empty(2, 8, like=x), norm=norm), torch.cat(both, 1))


def blocks_many(device):
    """A prompt, with and without a residual: inputs, tokens and rows that are no multiple of a tile."""
    for kind in KINDS:
        for n_in in WIDTHS[blocks.BLOCKS[kind][0]]:
            linear, dense = stored(kind, many.ROWS + 5, n_in, device)
            for dtype in TOLERANCE if n_in < 300 else [torch.float32]:  # the interpreter takes its time
                x = torch.randn(unpack.FEW_TOKENS + 9, n_in, device=device).to(dtype)
                add = torch.randn(len(x), many.ROWS + 5, device=device).to(dtype)
                wanted = F.linear(wide(x), dense, wide(linear.bias)) + wide(add)
                near(many.linear(Matrix.of(linear), x, add_to=add), wanted, also=2)  # weights are rounded too
            linear.bias = None
            near(unpack.linear(Matrix.of(linear), x), F.linear(wide(x), dense), also=2)


def blocks_gated(device):
    for kind in KINDS:
        for n_in in WIDTHS[blocks.BLOCKS[kind][0]]:
            norm = RMSNorm(n_in, Norm(eps=1e-5)).to(device)
            norm.weight.normal_().mul_(0.02)  # what comes out fits float16
            (gate, dense_gate), (up, dense_up) = (stored(kind, 5, n_in, device) for _ in range(2))
            for dtype in TOLERANCE:
                x = torch.randn(n_in, device=device).to(dtype)
                y = normed(norm, x)
                g, u = F.linear(y, dense_gate, wide(gate.bias)), F.linear(y, dense_up, wide(up.bias))
                got = product.gated(x, Matrix.of(gate), Matrix.of(up), empty(5, like=x), norm=norm)
                near(got, F.silu(g) * u, also=4)  # two products, one of them twice


def blocks_lookup(device):
    for kind in KINDS:
        linear, dense = stored(kind, 7, 1280, device)
        out, token = torch.full((1280,), torch.nan, device=device), torch.tensor([5], device=device)
        near(sampling.lookup(Matrix.of(linear), token, out, 2.0), 2 * dense[5])


def blocks_mixed(device):
    """Neighbours of different forms, as in a Q4_K_M file and where a matrix was left unpacked."""
    made = [stored(kind, n_out, 256, device) for kind, n_out in (("Q4_K", 6), ("Q4_K", 5), ("Q6_K", 9))]
    eight = Int8Linear(torch.randint(-127, 127, (9, 256), dtype=torch.int8), torch.rand(9) / 50, torch.randn(9))
    made.append((eight.to(device), wide(eight.dequantize())))
    matrices = [Matrix.of(linear) for linear, _ in made]
    norm = RMSNorm(256, Norm(eps=1e-5)).to(device)
    norm.weight.normal_()
    x = torch.randn(256, device=device)
    results = [F.linear(normed(norm, x), dense, wide(linear.bias)) for linear, dense in made]
    near(product.project_mixed(x, matrices[:3], empty(20, like=x), norm=norm), torch.cat(results[:3]))
    with pytest.raises(ValueError, match="different forms"):
        product.project(x, matrices[:3], empty(20, like=x), norm=norm)
    got = product.gated_mixed(x, *matrices[2:], empty(9, like=x), norm=norm)
    near(got, F.silu(results[2]) * results[3], also=4)


CASES = [blocks_few, blocks_many, blocks_gated, blocks_lookup, blocks_mixed]
