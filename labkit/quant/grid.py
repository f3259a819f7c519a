"""The integer grids: where the points lie, rounding weights to them, and packing what was rounded.

int8       w ~ s[n] q[n, k]                    q in [-127, 127], one scale an output channel
groups     w ~ s[n, g] (q[n, k] - z[n, g])     q in [0, 2^bits), one scale (and zero point) a group of neighbours
           w ~ s[n, g] q[n, k] + m[n, g]       the same with a float minimum in place of the zero point

Whoever chooses the integers (round-to-nearest, GPTQ, AWQ, a file) hands them over as ``Groups``; whoever computes
reads a packed form of them. N output features, K input features, G = K / group_size groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
KINDS = ("symmetric", "asymmetric", "minimum")
N_RANGES, RANGE_STEP = 13, 0.04
"""Ranges that ``search`` tries: from the whole one down to 52 % of it."""


@dataclass(frozen=True)
class Groups:
    """A matrix as codes on grids of its groups: what a packed linear holds, however it packs it.

    codes uint8 (N, K) below 2^bits, scales (N, G), zeros (N, G) or None, minima (N, G) or None. With neither zeros
    nor minima the zero point is 2^(bits - 1).
    """

    bits: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    minima: Tensor | None = None

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def rows(self, which: Any) -> Groups:
        """Some rows: a slice, or their numbers."""
        zeros, minima = (None if t is None else t[which] for t in (self.zeros, self.minima))
        return Groups(self.bits, self.codes[which], self.scales[which], zeros, minima)

    def dequantize(self) -> Tensor:
        """float32 (N, K)."""
        codes = self.codes.float().unflatten(1, (-1, self.group_size))
        return _values(codes, self.bits, self.scales, self.zeros, self.minima).flatten(1)


@dataclass(frozen=True)
class Grid:
    """Where the points of a group lie, 2^bits of them, ``kind`` saying how scale and offset are chosen.

    symmetric    s = max|w| / (2^(bits-1) - 1/2), z = 2^(bits-1), not stored
    asymmetric   s = (max - min) / (2^bits - 1) with 0 inside [min, max], z = round(-min / s)
    minimum      s = (max - min) / (2^bits - 1), m = min: w ~ s q + m (ggml's Q4_1, Q5_1)
    """

    bits: int
    kind: str = "asymmetric"

    def fit(self, groups: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """groups (..., group_size) float -> scales float16, zeros uint8 or None, minima float16 or None: (...)."""
        top = 2**self.bits - 1
        if self.kind == "symmetric":
            return as_half(groups.abs().amax(dim=-1) / (top / 2)), None, None
        low, high = groups.amin(dim=-1), groups.amax(dim=-1)
        if self.kind == "minimum":
            return as_half((high - low) / top), None, _finite_half(low)
        low, high = low.clamp_max(0.0), high.clamp_min(0.0)
        scales = as_half((high - low) / top)
        return scales, torch.round(-low / scales.float()).clamp_(0, top).to(torch.uint8), None

    def search(self, groups: Tensor, importance: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As ``fit``, on the narrower range that errs least: sum of importance (group_size,) times error squared. What
        lies outside is cut off, and the rest is met more finely."""
        best: list[Tensor | None] = []
        least = torch.full(groups.shape[:-1], float("inf"))
        for step in range(N_RANGES):
            inner = groups * (1.0 - RANGE_STEP * step)
            found = self.fit(inner)
            error = (self.values(self.round(groups, *found), *found) - groups).square_().mul_(importance).sum(dim=-1)
            better = error < least
            least = torch.where(better, error, least)
            best = [
                None if new is None else torch.where(better, new, old if old is not None else new)
                for new, old in zip(found, best or (None, None, None), strict=True)
            ]
        scales, zeros, minima = best
        assert scales is not None
        return scales, zeros, minima

    def round(self, w: Tensor, scales: Tensor, zeros: Tensor | None, minima: Tensor | None) -> Tensor:
        """The codes (float) nearest to w (..., n): what ``fit`` chose is (...)."""
        s = scales.to(w.dtype)[..., None]
        if minima is not None:
            codes = (w - minima.to(w.dtype)[..., None]) / s
        else:
            codes = w / s + (2 ** (self.bits - 1) if zeros is None else zeros.to(w.dtype)[..., None])
        return codes.round_().clamp_(0, 2**self.bits - 1)

    def values(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, minima: Tensor | None) -> Tensor:
        """What the codes (float, (..., n)) stand for."""
        return _values(codes, self.bits, scales, zeros, minima)

    def nearest(self, weight: Tensor, group_size: int, *, any_size: bool = False) -> Groups:
        """Round to nearest: (N, K) -> ``Groups``. Raises ValueError when group_size does not divide K, or (unless
        ``any_size``) is none that the menu has."""
        if not any_size:
            check_group_size(weight.shape[1], group_size)
        parts = []
        for rows in _pieces(weight):
            groups = rows.unflatten(1, (-1, group_size))
            found = self.fit(groups)
            parts.append((self.round(groups, *found).to(torch.uint8).flatten(1), *found))
        codes, scales, zeros, minima = (None if p[0] is None else torch.cat(p) for p in zip(*parts, strict=True))
        assert codes is not None
        assert scales is not None
        return Groups(self.bits, codes, scales, zeros, minima)


def _values(codes: Tensor, bits: int, scales: Tensor, zeros: Tensor | None, minima: Tensor | None) -> Tensor:
    s = scales.to(codes.dtype)[..., None]
    if minima is not None:
        return codes * s + minima.to(codes.dtype)[..., None]
    return (codes - (2 ** (bits - 1) if zeros is None else zeros.to(codes.dtype)[..., None])) * s


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

    The error is at most s / 2, up to the rounding of s itself to float16.
    Raises ValueError when group_size does not divide K.
    """
    found = Grid(4, "symmetric" if symmetric else "asymmetric").nearest(weight, group_size)
    return found.codes, found.scales, found.zeros


def _rows(weight: Tensor) -> int:
    """Rows that are rounded together."""
    return max(1, PIECE_VALUES // max(1, weight.shape[1]))


def _pieces(weight: Tensor) -> Iterator[Tensor]:
    """The weight, some rows at a time: float32 where it has fewer bits."""
    for rows in weight.detach().split(_rows(weight)):
        yield rows.float() if rows.is_floating_point() else rows


def as_half(scales: Tensor) -> Tensor:
    """Scales as float16, never zero. Raises ValueError when one is too large for it."""
    half = scales.clamp_min(TINY).to(torch.float16)
    if not torch.isfinite(half).all():
        raise ValueError(
            "a group's weights are too large for a float16 scale (above 65504): load with weights=None or 'int8'."
        )
    return half


def _finite_half(minima: Tensor) -> Tensor:
    half = minima.to(torch.float16)
    if not torch.isfinite(half).all():
        raise ValueError("a group's weights are too large for a float16 minimum (above 65504): load with 'int8'.")
    return half


def check_group_size(n_in: int, group_size: int) -> None:
    """Raise ValueError that names the group sizes that do divide ``n_in``."""
    if group_size in GROUP_SIZES and n_in % group_size == 0:
        return
    fits = [str(size) for size in GROUP_SIZES if n_in % size == 0]
    advice = f"choose group_size={' or '.join(fits)}" if fits else "use weights='int8' for this model"
    raise ValueError(f"groups of {group_size} do not divide a layer's {n_in} inputs: {advice}.")


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
