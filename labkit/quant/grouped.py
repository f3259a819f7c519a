"""A linear layer on any grid of groups, 2 to 8 bits: packed as ``planes``.

The forms with compiled kernels have classes of their own (``linear``); this one holds whatever else a method or a
file brings, in its true number of bytes, and plain PyTorch computes with it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.kernels import panel_layout
from labkit.kernels.cpu import linear as compiled
from labkit.quant import planes
from labkit.quant.grid import Groups
from labkit.quant.linear import PackedLinear


class GroupLinear(PackedLinear):
    """``bits`` a weight; float16 scales and, as the grid asks, uint8 zero points or float16 minima, one a group.

    ``order`` (K,): the input that each packed column belongs to, where a file sorted its columns (GPTQ's act-order):
    W[:, order[k]] is column k of the codes.
    """

    kind = "groups"
    own = ("weight", "scales", "zeros", "minima")
    zeros: Tensor | None
    minima: Tensor | None
    order: Tensor | None

    def __init__(self, groups: Groups, bias: Tensor | None = None, *, order: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = groups.codes.shape
        self.bits, self.group_size = groups.bits, groups.group_size
        self.register_buffer("weight", planes.pack(groups.codes, groups.bits))
        self.register_buffer("scales", groups.scales.contiguous())
        self.register_buffer("zeros", groups.zeros)
        self.register_buffer("minima", groups.minima)
        self.register_buffer("order", order)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def why_not_compiled(self) -> str | None:
        if self.order is not None:
            return "columns in an order of their own have no compiled product: plain PyTorch unpacks them."
        return panel_layout.why_not(self.bits, self.in_features, self.group_size)

    def groups(self) -> Groups:
        codes = planes.unpack(self.weight, self.in_features, self.bits)
        return Groups(self.bits, codes, self.scales, self.zeros, self.minima)

    def dequantize(self) -> Tensor:
        weight, scales, zeros, minima, made = self.weight, self.scales, self.zeros, self.minima, self._layout
        if made is not None:
            return made.dequantize()
        codes = planes.unpack(weight, self.in_features, self.bits)
        return self._in_order(Groups(self.bits, codes, scales, zeros, minima).dequantize())

    def rows(self, ids: Tensor) -> Tensor:
        weight, scales, zeros, minima, made = self.weight, self.scales, self.zeros, self.minima, self._layout
        if made is not None:
            return made.rows(ids)
        codes = planes.unpack(weight[ids], self.in_features, self.bits)
        zeros, minima = (None if t is None else t[ids] for t in (zeros, minima))
        return self._in_order(Groups(self.bits, codes, scales[ids], zeros, minima).dequantize())

    def _in_order(self, dense: Tensor) -> Tensor:
        if self.order is None:
            return dense
        return torch.empty_like(dense).index_copy_(1, self.order.long(), dense)

    def forward(self, x: Tensor) -> Tensor:
        if compiled.active() and self.why_not_compiled is None:
            return compiled.multiply(self.table_row(), x, self.bias)
        return F.linear(x, self.dequantize().to(x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.bits} bits, groups of {self.group_size}"


def linear_of(groups: Groups, bias: Tensor | None = None, *, order: Tensor | None = None) -> PackedLinear:
    """The packed linear for ``groups``: the one with compiled kernels where there is one."""
    from labkit.quant.grid import GROUP_SIZES
    from labkit.quant.linear import Int4Linear

    if groups.bits == 4 and groups.minima is None and order is None and groups.group_size in GROUP_SIZES:
        return Int4Linear(groups.codes, groups.scales, groups.zeros, bias)
    return GroupLinear(groups, bias, order=order)


def nbytes(n_out: int, n_in: int, *, bits: int, group_size: int, kind: str) -> int:
    """Bytes of a ``GroupLinear``: codes, a float16 scale a group, and its zero point (1 byte) or minimum (2)."""
    per_group = {"symmetric": 2, "asymmetric": 3, "minimum": 4}[kind]
    return n_out * (planes.row_nbytes(n_in, bits) + n_in // group_size * per_group)
