"""The integer grids: rounding weights to them, and packing what was rounded.

int8   w ~ s[n] q[n, k]                    q in [-127, 127], one scale an output channel
int4   w ~ s[n, g] (q[n, k] - z[n, g])     q in [0, 15], one scale (and zero point) a group of consecutive inputs

Whoever chooses the integers (round-to-nearest, GPTQ, AWQ, a file) hands them to ``pack_int4``; whoever computes reads
the packed form. N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PANEL = 4
"""Rows that lie side by side in the packed int4 form, so that a kernel reads one stream for all of them."""
BLOCK = 64
"""Weights of one row in one 32-byte vector."""
GROUP_SIZES = (32, 64, 128)
PIECE_VALUES = 2**18
"""Weights that are rounded together: what is in between stays in the processor's cache."""
TINY = 6e-8
"""The smallest float16 scale: an all-zero group keeps a scale that can be divided by."""


def round_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(N, K) -> q int8 (N, K) and scales float32 (N,), symmetric: s = max|w| / 127. The error is at most s / 2."""
    q = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[:1], dtype=torch.float32, device=weight.device)
    for rows, into, step in zip(_pieces(weight), _pieces(q), scales.split(_rows(weight)), strict=True):
        step.copy_((rows.abs().amax(dim=1) / 127).clamp_min_(1e-30))
        into.copy_((rows / step[:, None]).round_().clamp_(-127, 127))
    return q, scales


def round_int4(weight: Tensor, group_size: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(N, K) -> q uint8 (N, K) in 0..15, scales float16 (N, K / group_size), zeros uint8 or None (all 8).

    symmetric   s = max|w| / 7.5, z = 8
    asymmetric  s = (max - min) / 15 with 0 inside [min, max], z = round(-min / s)

    The error is at most s / 2, up to the rounding of s itself to float16.
    Raises ValueError when group_size does not divide K.
    """
    check_group_size(weight.shape[1], group_size)
    parts = [_round_int4(rows, group_size, symmetric) for rows in _pieces(weight)]
    q, scales, zeros = zip(*parts, strict=True)
    return torch.cat(q), torch.cat(scales), None if symmetric else torch.cat(zeros)


def _rows(weight: Tensor) -> int:
    """Rows that are rounded together."""
    return max(1, PIECE_VALUES // max(1, weight.shape[1]))


def _pieces(weight: Tensor) -> Iterator[Tensor]:
    """The weight, some rows at a time: float32 where it has fewer bits."""
    for rows in weight.detach().split(_rows(weight)):
        yield rows.float() if rows.is_floating_point() else rows


def _round_int4(weight: Tensor, group_size: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    groups = weight.unflatten(1, (-1, group_size))  # (N, G, group_size)
    if symmetric:
        scales = as_half(groups.abs().amax(dim=-1) / 7.5)
        zeros, offset = None, torch.full_like(scales, 8.0, dtype=torch.float32)
    else:
        low, high = groups.amin(dim=-1).clamp_max(0.0), groups.amax(dim=-1).clamp_min(0.0)
        scales = as_half((high - low) / 15)
        offset = torch.round(-low / scales.float()).clamp_(0, 15)
        zeros = offset.to(torch.uint8)
    q = (groups / scales.float()[..., None]).add_(offset[..., None]).round_().clamp_(0, 15)
    return q.to(torch.uint8).flatten(1), scales, zeros


def as_half(scales: Tensor) -> Tensor:
    """Scales as float16, never zero. Raises ValueError when one is too large for it."""
    half = scales.clamp_min(TINY).to(torch.float16)
    if not torch.isfinite(half).all():
        raise ValueError(
            "a group's weights are too large for a float16 scale (above 65504): load with weights=None or 'int8'."
        )
    return half


def check_group_size(n_in: int, group_size: int) -> None:
    """Raise ValueError that names the group sizes that do divide ``n_in``."""
    if group_size in GROUP_SIZES and n_in % group_size == 0:
        return
    fits = [str(size) for size in GROUP_SIZES if n_in % size == 0]
    advice = f"choose group_size={' or '.join(fits)}" if fits else "use weights='int8' for this model"
    raise ValueError(f"int4 groups of {group_size} do not divide a layer's {n_in} inputs: {advice}.")


# --- packing --------------------------------------------------------------------------------------------------


def packed_shapes(n_out: int, n_in: int, group_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the packed weights (uint8) and of the scales (float16; zeros likewise, uint8).

    Rows are padded to whole panels and inputs to whole blocks, with weights that are exactly zero.

    >>> packed_shapes(576, 1536, 64)
    ((144, 24, 4, 32), (144, 24, 4))
    """
    panels, blocks = -(-n_out // PANEL), -(-n_in // BLOCK)
    return (panels, blocks, PANEL, BLOCK // 2), (panels, -(-blocks * BLOCK // group_size), PANEL)


def pack_int4(q: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """q (N, K) 0..15, scales (N, G), zeros (N, G) or None -> the packed weights, scales and zeros.

    A block of 64 weights is 16 words of 16 bits: nibble j of word i is weight 16 j + i, so masking a whole vector
    yields 16 consecutive weights. Four rows' blocks lie side by side (a panel), and their scales too.
    """
    n_out, n_in = q.shape
    shape, scale_shape = packed_shapes(n_out, n_in, n_in // scales.shape[1])
    fill = torch.full((shape[0] * PANEL, shape[1] * BLOCK), 0, dtype=torch.uint8, device=q.device)
    fill[:n_out, :n_in] = q
    nibbles = fill.unflatten(1, (-1, 4, 16))  # (N, blocks, j, i)
    low, high = nibbles[:, :, 0] | nibbles[:, :, 1] << 4, nibbles[:, :, 2] | nibbles[:, :, 3] << 4
    rows = torch.stack((low, high), dim=-1).flatten(-2)  # (N, blocks, 32), little-endian words
    packed = rows.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()  # (panels, blocks, PANEL, 32)
    return packed, _panels(scales, scale_shape), None if zeros is None else _panels(zeros, scale_shape)


def unpack_int4(packed: Tensor, n_out: int, n_in: int) -> Tensor:
    """The inverse of ``pack_int4`` for the integers: uint8 (N, K)."""
    pairs = packed.transpose(1, 2).flatten(0, 1).unflatten(-1, (16, 2))  # (N, blocks, i, low and high byte)
    nibbles = torch.stack((pairs[..., 0] & 15, pairs[..., 0] >> 4, pairs[..., 1] & 15, pairs[..., 1] >> 4), dim=-2)
    return nibbles.flatten(1)[:n_out, :n_in]


def unpack_groups(panels: Tensor, n_out: int, n_groups: int) -> Tensor:
    """Scales or zeros from panels back to (N, G)."""
    return panels.transpose(1, 2).flatten(0, 1)[:n_out, :n_groups]


def _panels(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    fill = torch.zeros((shape[0] * PANEL, shape[1]), dtype=values.dtype, device=values.device)
    fill[: values.shape[0], : values.shape[1]] = values
    return fill.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
