"""A linear layer whose weights lie as a GGUF file has them: ggml's blocks, byte for byte.

Nothing is rounded a second time and nothing is unpacked in memory. The reference widens the blocks for each product;
a CPU's compiled products lay the same codes, scales and minima out their own way (``labkit.kernels.panel_layout``), a
GPU's read the blocks as they are (``labkit.kernels.triton.blocks``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.kernels import packed, panel_layout
from labkit.kernels.cpu import linear as compiled
from labkit.quant import block_groups, blocks, grouped, size
from labkit.quant.format import WeightFormat, register_format
from labkit.quant.grid import GROUP_SIZES, Grid, Groups
from labkit.quant.grouped import linear_of
from labkit.quant.linear import PackedLinear
from labkit.registry import register

PLAIN = "plain"


class StoredLinear(PackedLinear):
    """``weight`` (N, bytes of a row) uint8: rows of ``blocks`` of the format ``kind`` ("Q4_1", "Q6_K", ...)."""

    own = ("weight",)

    def __init__(self, kind: str, raw: Tensor, n_in: int, bias: Tensor | None = None) -> None:
        super().__init__()
        self.kind = kind
        self.out_features, self.in_features = len(raw), n_in
        self.register_buffer("weight", raw)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def groups(self) -> Groups:
        """The same matrix as codes, scales and minima: what a kernel packs its own way."""
        return block_groups.groups(self.weight, self.kind, self.in_features)

    def dequantize(self) -> Tensor:
        return self._widen(torch.float32)

    def rows(self, ids: Tensor) -> Tensor:
        raw, made = self.weight, self._layout
        return self._of_blocks(raw[ids], torch.float32) if made is None else made.rows(ids)

    def forward(self, x: Tensor) -> Tensor:
        if compiled.active() and self.why_not_compiled is None:
            return compiled.multiply(self.table_row(), x, self.bias)
        if x.is_cuda and self._layout is None and self.gpu_kind and (kernels := packed.on_gpu()) is not None:
            return kernels.linear(kernels.Matrix.of(self), x)
        return F.linear(x, self._widen(x.dtype), self.bias)

    @property
    def gpu_kind(self) -> int | None:
        return 100 + blocks.NUMBERS[self.kind] if block_groups.has(self.kind) else None

    @property
    def why_not_compiled(self) -> str | None:
        if block_groups.has(self.kind):
            return None
        return f"{self.kind} blocks have no compiled product: plain PyTorch unpacks them for each step."

    def _widen(self, dtype: torch.dtype) -> Tensor:
        raw, made = self.weight, self._layout
        return self._of_blocks(raw, dtype) if made is None else made.dequantize().to(dtype)

    def _of_blocks(self, raw: Tensor, dtype: torch.dtype) -> Tensor:
        if raw.device.type != "cpu":
            return block_groups.groups(raw, self.kind, self.in_features).dequantize().to(dtype)
        return blocks.dequantize(raw.contiguous().view(-1), self.kind, (len(raw), self.in_features), dtype)


def stand_in(kind: str, linear: nn.Linear) -> Any:
    """A matrix of this form whose numbers mean nothing: for forecasts, which time a form and not its values. In a
    stand-in too narrow for blocks of 256 the shorter blocks stand for them."""
    n_out, n_in = linear.out_features, linear.in_features
    if kind == PLAIN:
        return linear
    if n_in % blocks.BLOCKS[kind][0]:
        kind = "Q8_0" if kind == "Q6_K" else "Q4_1"
    return StoredLinear(kind, blocks.anything(kind, n_out, n_in), n_in, linear.bias)


@dataclass(frozen=True)
class Stored(WeightFormat):
    """As the file packs them: ``layers`` and ``head`` name ggml's formats, ``others`` the linears that differ from
    ``layers``, by their full name; ``table`` the embedding where the head is not it ("plain": in the model's dtype).
    A file decides these; a forecast and a label read them."""

    from_file: ClassVar[bool] = True
    layers: str = "Q4_1"
    head: str = "Q8_0"
    table: str = PLAIN
    others: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    panels: bool = field(default=False, repr=False)
    """Whether bytes are counted as a CPU's compiled step holds the blocks, once it has laid them out."""

    def compiled(self) -> Stored:
        return replace(self, panels=True)

    def kind_of(self, name: str) -> str:
        """The format of the linear ``name`` (``layers.0.ffn.up_proj``)."""
        return dict(self.others).get(name, self.layers)

    def layer(self, name: str, linear: nn.Linear) -> Any:
        return stand_in(self.kind_of(f"layers.{name}"), linear)

    def top(self, linear: nn.Linear) -> Any:
        return stand_in(self.head, linear)

    def layer_nbytes(self, n_out: int, n_in: int, name: str = "") -> int | None:
        return self._nbytes(self.kind_of(name.removesuffix(".weight")), n_out, n_in)

    def top_nbytes(self, n_out: int, n_in: int) -> int | None:
        return self._nbytes(self.head, n_out, n_in)

    def table_nbytes(self, n_out: int, n_in: int) -> int | None:
        return self._nbytes(self.table, n_out, n_in)

    def _nbytes(self, kind: str, n_out: int, n_in: int) -> int | None:
        if kind == PLAIN:
            return None
        in_blocks = n_out * blocks.row_nbytes(kind, n_in)
        if not (self.panels and block_groups.has(kind)):
            return in_blocks
        bits, group, group_nbytes = block_groups.SIZES[kind]
        return panel_layout.nbytes(n_out, n_in, bits=bits, group=group, group_nbytes=group_nbytes)


@dataclass(frozen=True)
class Packed(WeightFormat):
    """As a GPTQ, AWQ or compressed-tensors file packs the layers; the head is plain. ``group_size`` 0: a group is a
    whole row. ``ordered``: a column's input is stored beside it (act-order)."""

    from_file: ClassVar[bool] = True
    bits: int = 4
    group_size: int = 128
    kind: str = "asymmetric"
    ordered: bool = False
    panels: bool = field(default=False, repr=False)
    """As in ``Stored``."""

    def compiled(self) -> Packed:
        return replace(self, panels=True)

    def layer(self, name: str, linear: nn.Linear) -> PackedLinear:
        n_in = linear.in_features
        group = self.group_size if self.group_size and n_in % self.group_size == 0 else n_in
        order = torch.arange(n_in, dtype=torch.int32) if self.ordered else None
        return linear_of(
            Grid(self.bits, self.kind).nearest(linear.weight, group, any_size=True), linear.bias, order=order
        )

    def top(self, linear: nn.Linear) -> Any:
        return linear

    def layer_nbytes(self, n_out: int, n_in: int, name: str = "") -> int:
        group = self.group_size or n_in
        if self.panels and not self.ordered and panel_layout.why_not(self.bits, n_in, group) is None:
            return size.panels_nbytes(n_out, n_in, bits=self.bits, group_size=group, kind=self.kind)
        if self.ordered or group not in GROUP_SIZES:
            plain = grouped.nbytes(n_out, n_in, bits=self.bits, group_size=group, kind=self.kind)
            return plain + (4 * n_in if self.ordered else 0)
        return size.groups_nbytes(n_out, n_in, bits=self.bits, group_size=group, kind=self.kind)

    def top_nbytes(self, n_out: int, n_in: int) -> None:
        return None


@dataclass(frozen=True)
class Plain:
    """Numbers of the model's dtype, whatever the file packed: no format at all."""


register_format("packed", Packed, summary="As a GPTQ, AWQ or compressed-tensors file packs them")
register_format("stored", Stored, summary="As the file packs them: nothing unpacked, nothing rounded again")


@register("weights", "plain", config=Plain, summary="Unpacked into the model's dtype: the most bytes")
def build_plain(config: Plain, *, transformer: Any) -> Any:
    return transformer
