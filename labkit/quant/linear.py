"""Linear layers whose weights stay packed: they compute from the packed form and can be unpacked to check it."""

from __future__ import annotations

from typing import Any

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
    """``x W^T + b`` with W in fewer bits. Subclasses hold W; ``dequantize`` gives it back, (N, K) float32."""

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
    _panels: tuple[Any, Panels] | None = None

    def dequantize(self) -> Tensor:
        raise NotImplementedError

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` of W, float32 (len(ids), K): what an embedding that shares the head's weights looks up."""
        raise NotImplementedError

    def panels(self) -> Panels:
        """The same weights as a CPU's compiled products read them: made when first asked for, and kept."""
        stamp = self.weight.data_ptr(), self.weight._version
        if self._panels is None or self._panels[0] != stamp:
            self._panels = stamp, self._make_panels()
        return self._panels[1]

    def groups(self) -> grid.Groups:
        """The matrix as codes, scales and offsets of groups: what a kernel packs its own way."""
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

    def dequantize(self) -> Tensor:
        return self.weight[:, : self.in_features].float() * self.scales[:, None]

    def _make_panels(self) -> Panels:
        return panel_layout.pack_int8(self.weight[:, : self.in_features], self.scales, offset=self.round_tokens)

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight[ids, : self.in_features].float() * self.scales[ids, None]

    def forward(self, x: Tensor) -> Tensor:
        if compiled.active():
            return compiled.multiply(self.table_row(), x, self.bias)
        if self.round_tokens:
            return packed.linear_w8a8(x, self.weight, self.scales, self.bias)
        return packed.linear_int8(x, self.weight, self.scales, self.bias)


class Int4Linear(PackedLinear):
    """Half a byte a weight, one float16 scale (and one byte of zero point, unless symmetric) a group."""

    kind = "int4"
    gpu_kind = 4
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
        return packed.unpack_weight_int4(
            self.weight, self.scales, self.zeros, self.group_size, self.out_features, self.in_features
        )

    def rows(self, ids: Tensor) -> Tensor:
        panels, inverse = torch.unique(ids // grid.PANEL, return_inverse=True)
        zeros = None if self.zeros is None else self.zeros[panels]
        found = packed.unpack_weight_int4(
            self.weight[panels], self.scales[panels], zeros, self.group_size, len(panels) * grid.PANEL, self.in_features
        )
        return found[inverse * grid.PANEL + ids % grid.PANEL]

    def forward(self, x: Tensor) -> Tensor:
        if compiled.active():
            return compiled.multiply(self.table_row(), x, self.bias)
        return packed.linear_int4(
            x, self.weight, self.scales, self.zeros, self.group_size, self.out_features, self.bias
        )


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
