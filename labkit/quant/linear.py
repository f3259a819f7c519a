"""Linear layers whose weights stay packed: they compute from the packed form and can be unpacked to check it."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.kernels import packed, panel_layout
from labkit.kernels.cpu import linear as compiled
from labkit.kernels.panel_layout import Panels
from labkit.quant import grid

INT8_PAD = 32
"""Inputs are padded to whole vectors of this many."""


class PackedLinear(nn.Module):
    """``x W^T + b`` with W in fewer bits. Subclasses hold W; ``dequantize`` gives it back, (N, K) float32.

    Once a CPU's compiled products have asked for ``panels``, these hold the codes and the layout of ``own`` is let go:
    the same numbers in another order, and not twice in memory. Who reads ``own`` reads it before ``_layout``, which is
    set first: another thread may ask meanwhile."""

    own: ClassVar[tuple[str, ...]] = ("weight", "scales")
    """Buffers that the panels make superfluous."""

    kind: str
    in_features: int
    out_features: int
    bias: nn.Parameter | None
    weight: Tensor
    scales: Tensor
    why_not_compiled: str | None = None
    """Why the compiled steps leave a model with such a linear to plain PyTorch; None when they have its product."""
    gpu_kind: int | None = None
    """The number under which the GPU's kernels know this layout; None: they do not."""
    _layout: Panels | None = None

    def dequantize(self) -> Tensor:
        raise NotImplementedError

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` of W, float32 (len(ids), K): what an embedding that shares the head's weights looks up."""
        raise NotImplementedError

    def panels(self) -> Panels:
        """The same weights as a CPU's compiled products read them: made when first asked for, and kept instead."""
        if self._layout is None:
            self._layout = made = self._make_panels()
            for name, tensor in (("codes", made.codes), ("scales", made.scales), ("minima", made.minima)):
                self.register_buffer(f"panel_{name}", tensor)
            for name in self.own:
                if (tensor := getattr(self, name)) is not None:
                    setattr(self, name, tensor.new_empty(0))
        return self._layout

    def groups(self) -> grid.Groups:
        """The matrix as codes, scales and offsets of groups: what a kernel packs its own way, before it has."""
        raise NotImplementedError

    def _make_panels(self) -> Panels:
        found = self.groups()
        return panel_layout.pack(found.codes, found.scales, bits=found.bits, zeros=found.zeros, minima=found.minima)

    def table_row(self) -> list[int]:
        """How compiled kernels see these weights: addresses and sizes (``labkit.kernels.cpu.plan``)."""
        from labkit.kernels.cpu.plan import describe

        return describe(self)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.kind}"


class Int8Linear(PackedLinear):
    """One byte a weight, one float32 scale an output channel.

    ``round_tokens``: the activations are rounded too, 64 of a token to one grid, and the product is one of bytes.
    At every number of tokens, so that a token's numbers do not depend on its company.
    """

    kind = "int8"
    gpu_kind = 8

    def __init__(self, q: Tensor, scales: Tensor, bias: Tensor | None = None, *, round_tokens: bool = False) -> None:
        super().__init__()
        self.round_tokens = round_tokens
        self.out_features, self.in_features = q.shape
        self.register_buffer("weight", F.pad(q, (0, -q.shape[1] % INT8_PAD)).contiguous())
        self.register_buffer("scales", scales)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def _matrix(self) -> tuple[Tensor, Tensor]:
        """The codes int8 (N, K or more) and the scales (N,), wherever they are held."""
        weight, scales, made = self.weight, self.scales, self._layout
        if made is None:
            return weight, scales
        codes = made.codes ^ 128 if self.round_tokens else made.codes
        bare = replace(made, codes=codes, scales=torch.ones_like(made.scales))
        return bare.dequantize().to(torch.int8), made.scales.flatten()[: self.out_features]

    def dequantize(self) -> Tensor:
        codes, scales = self._matrix()
        return codes[:, : self.in_features].float() * scales[:, None]

    def _make_panels(self) -> Panels:
        return panel_layout.pack_int8(self.weight[:, : self.in_features], self.scales, offset=self.round_tokens)

    def rows(self, ids: Tensor) -> Tensor:
        weight, scales, made = self.weight, self.scales, self._layout
        if made is not None and not self.round_tokens:
            return made.rows(ids)
        if made is not None:
            weight, scales = self._matrix()
        return weight[ids, : self.in_features].float() * scales[ids, None]

    def forward(self, x: Tensor) -> Tensor:
        if compiled.active():
            return compiled.multiply(self.table_row(), x, self.bias)
        multiply = packed.linear_w8a8 if self.round_tokens else packed.linear_int8
        return multiply(x, *self._matrix(), self.bias)


class Int4Linear(PackedLinear):
    """Half a byte a weight, one float16 scale (and one byte of zero point, unless symmetric) a group."""

    kind = "int4"
    gpu_kind = 4
    own = ("weight", "scales", "zeros")
    zeros: Tensor | None

    def __init__(self, q: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = q.shape
        self.group_size = self.in_features // scales.shape[1]
        for name, tensor in zip(("weight", "scales", "zeros"), grid.pack_int4(q, scales, zeros), strict=True):
            self.register_buffer(name, tensor)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def groups(self) -> grid.Groups:
        """The codes, scales and zero points in rows: what was packed."""
        n, k = self.out_features, self.in_features
        scales, zeros = (
            None if t is None else grid.unpack_groups(t, n, k // self.group_size) for t in (self.scales, self.zeros)
        )
        assert scales is not None
        return grid.Groups(4, grid.unpack_int4(self.weight, n, k), scales, zeros)

    def dequantize(self) -> Tensor:
        weight, scales, zeros, made = self.weight, self.scales, self.zeros, self._layout
        if made is not None:
            return made.dequantize()
        return packed.unpack_weight_int4(weight, scales, zeros, self.group_size, self.out_features, self.in_features)

    def rows(self, ids: Tensor) -> Tensor:
        weight, scales, zeros, made = self.weight, self.scales, self.zeros, self._layout
        if made is not None:
            return made.rows(ids)
        panels, inverse = torch.unique(ids // grid.PANEL, return_inverse=True)
        zeros = None if zeros is None else zeros[panels]
        found = packed.unpack_weight_int4(
            weight[panels], scales[panels], zeros, self.group_size, len(panels) * grid.PANEL, self.in_features
        )
        return found[inverse * grid.PANEL + ids % grid.PANEL]

    def forward(self, x: Tensor) -> Tensor:
        if compiled.active():
            return compiled.multiply(self.table_row(), x, self.bias)
        weight, scales, zeros, made = self.weight, self.scales, self.zeros, self._layout
        if made is not None:
            return F.linear(x, made.dequantize().to(x.dtype), self.bias)
        return packed.linear_int4(x, weight, scales, zeros, self.group_size, self.out_features, self.bias)


class PackedEmbedding(nn.Module):
    """Looks rows up in the packed head, for a model whose embedding and head are one matrix."""

    weight: Tensor
    """Empty: it carries the dtype and the device that the model computes in."""

    def __init__(self, head: PackedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = head
        self.num_embeddings, self.embedding_dim = head.out_features, head.in_features
        self.register_buffer("weight", torch.empty(0, dtype=dtype, device=head.weight.device))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head.rows(ids).to(self.weight.dtype)
