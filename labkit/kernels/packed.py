"""Products with packed weights, as ``torch.library`` ops: the plain PyTorch here is what every kernel must equal.

    linear_int8(x, weight, scales, bias)                            x (..., K) -> (..., N)
    linear_w8a8(x, weight, scales, bias)                            the same, x rounded to bytes, block by block
    linear_int4(x, weight, scales, zeros, group_size, n_out, bias)

The packed layouts are ``labkit.quant.grid``'s. On a GPU int8 and int4 go through Triton
(``labkit.kernels.triton.unpack``), as a file's own blocks do; elsewhere the weights are unpacked and multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def unpack_weight_int4(
    weight: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int, n_out: int, n_in: int
) -> Tensor:
    """s (q - z), float32 (N, K): weight (panels, blocks, 4, 32) uint8, scales and zeros (panels, G, 4)."""
    pairs = weight.transpose(1, 2).flatten(0, 1).unflatten(-1, (16, 2))  # (N, blocks, i, low and high byte)
    nibbles = torch.stack((pairs[..., 0] & 15, pairs[..., 0] >> 4, pairs[..., 1] & 15, pairs[..., 1] >> 4), dim=-2)
    q = nibbles.flatten(1).float()  # (N, K): weight 16 j + i of its block is nibble j of word i
    scale = scales.transpose(1, 2).flatten(0, 1).float()  # (N, G)
    zero = torch.full_like(scale, 8.0) if zeros is None else zeros.transpose(1, 2).flatten(0, 1).float()
    n_padded = scale.shape[1] * group_size
    q = F.pad(q, (0, n_padded - q.shape[1])) if n_padded > q.shape[1] else q[:, :n_padded]
    dense = (q.unflatten(1, (-1, group_size)) - zero[..., None]) * scale[..., None]
    return dense.flatten(1)[:n_out, :n_in]


TOKEN_LEVELS = 63
"""Steps from zero to the largest of a block's activations, where tokens are rounded to bytes: two products of such a
number with an int8 weight fit 16 bits, which is what a CPU without a dot-product instruction adds them in."""
TOKEN_BLOCK = 64
"""Neighbouring activations of a token that share a step. With one step a token the price is six times as high."""


def round_tokens(x: Tensor) -> Tensor:
    """x (..., K) as W8A8 sees it: each block of a token's activations rounded to ``TOKEN_LEVELS`` steps, float32."""
    n = x.shape[-1]
    blocks = F.pad(x.float(), (0, -n % TOKEN_BLOCK)).unflatten(-1, (-1, TOKEN_BLOCK))
    steps = (blocks.abs().amax(dim=-1, keepdim=True) / TOKEN_LEVELS).clamp_min(1e-30)
    return (torch.round(blocks / steps) * steps).flatten(-2)[..., :n]


@lru_cache(maxsize=1)
def on_gpu() -> Any:
    """``labkit.kernels.triton.unpack``, or None where Triton is not installed."""
    try:
        from labkit.kernels.triton import unpack
    except ImportError:
        return None
    return unpack


def _linear_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    if x.is_cuda and (kernels := on_gpu()) is not None:
        return kernels.linear(kernels.Matrix(8, weight, scales, None, bias, weight.shape[0], x.shape[-1], 64), x)
    dense = weight[:, : x.shape[-1]].to(x.dtype)
    out = F.linear(x, dense) * scales.to(x.dtype)
    return out if bias is None else out + bias


def _linear_int8_shape(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _linear_w8a8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    out = F.linear(round_tokens(x), weight[:, : x.shape[-1]].float()) * scales
    return (out if bias is None else out + bias).to(x.dtype)


def _linear_w8a8_shape(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _linear_int4(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int, n_out: int, bias: Tensor | None
) -> Tensor:
    if x.is_cuda and (kernels := on_gpu()) is not None:
        matrix = kernels.Matrix.packed(weight, scales, zeros, bias, n_out, x.shape[-1], group_size)
        return kernels.linear(matrix, x)
    dense = unpack_weight_int4(weight, scales, zeros, group_size, n_out, x.shape[-1]).to(x.dtype)
    return F.linear(x, dense, bias)


def _linear_int4_shape(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int, n_out: int, bias: Tensor | None
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n_out))


def _register(schema: str, compute: Callable[..., Tensor], shape: Callable[..., Tensor]) -> Any:
    """A ``torch.library`` op. Not ``custom_op``: its first call imports PyTorch's compiler, 2.7 s into a first run."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, compute, "CompositeExplicitAutograd")
    _library.impl(name, shape, "Meta")
    return getattr(torch.ops.labkit, name)


_library = torch.library.Library("labkit", "FRAGMENT")
_SCHEMA = "(Tensor x, Tensor weight, Tensor scales, Tensor? bias) -> Tensor"
linear_int8 = _register("linear_int8" + _SCHEMA, _linear_int8, _linear_int8_shape)
linear_w8a8 = _register("linear_w8a8" + _SCHEMA, _linear_w8a8, _linear_w8a8_shape)
linear_int4 = _register(
    "linear_int4(Tensor x, Tensor weight, Tensor scales, Tensor? zeros, int group_size, int n_out, Tensor? bias) "
    "-> Tensor",
    _linear_int4,
    _linear_int4_shape,
)
