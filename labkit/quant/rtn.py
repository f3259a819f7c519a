"""Round to nearest: each weight to the closest point of its grid, nothing else asked.

No calibration text, a second or two for a small model, and the baseline that GPTQ and AWQ must beat.

The head and a tied embedding hold a fifth of SmolLM2-135M's weights and choose among 49,152 words by small margins:
the narrow formats keep them in int8 unless told otherwise, as the default model's own file does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from labkit.quant import grid, grouped, size
from labkit.quant.format import WeightFormat, register_format
from labkit.quant.grid import Grid
from labkit.quant.linear import Int8Linear, PackedLinear
from labkit.registry import option


@dataclass(frozen=True)
class Int8(WeightFormat):
    """Per-channel symmetric int8."""

    round_tokens: ClassVar[bool] = False

    def layer(self, name: str, linear: nn.Linear) -> Int8Linear:
        return Int8Linear(*grid.round_int8(linear.weight), linear.bias, round_tokens=self.round_tokens)

    def top(self, linear: nn.Linear) -> Int8Linear:
        return to_int8(linear)

    def layer_nbytes(self, n_out: int, n_in: int, name: str = "") -> int:
        return size.int8_nbytes(n_out, n_in)


@dataclass(frozen=True)
class W8A8(Int8):
    """int8 weights that meet activations in bytes.

    64 neighbouring activations of a token share a step. Its price: perplexity +1.5 % on SmolLM2-135M, where int8
    weights alone cost +0.5 % (``benchmarks/weights.py``).
    """

    round_tokens: ClassVar[bool] = True


class GroupedFormat(WeightFormat):
    """Codes of ``bits`` in groups, on a grid of ``kind``, and a head in int8 or in the same form."""

    group_size: int
    head: str
    bits: Any
    kind: Any

    def groups_of(self, linear: nn.Linear) -> grid.Groups:
        return Grid(self.bits, self.kind).nearest(linear.weight, self.group_size)

    def layer(self, name: str, linear: nn.Linear) -> PackedLinear:
        return grouped.linear_of(self.groups_of(linear), linear.bias)

    def top(self, linear: nn.Linear) -> PackedLinear:
        return to_int8(linear) if self.head == "int8" else self.layer("head", linear)

    def layer_nbytes(self, n_out: int, n_in: int, name: str = "") -> int:
        return size.groups_nbytes(n_out, n_in, bits=self.bits, group_size=self.group_size, kind=self.kind)

    def top_nbytes(self, n_out: int, n_in: int) -> int:
        return size.int8_nbytes(n_out, n_in) if self.head == "int8" else self.layer_nbytes(n_out, n_in)

    def compiled(self) -> WeightFormat:
        head = "int8" if self.head == "int8" else "same"
        return RTN(self.bits, self.group_size, self.kind, head, panels=True)


@dataclass(frozen=True)
class Int4(GroupedFormat):
    """Grouped int4. ``group_size`` must divide every layer's inputs (576 = 9 * 64: 32 or 64 on SmolLM2)."""

    bits: ClassVar[int] = 4
    group_size: int = option(64, choices=grid.GROUP_SIZES, help="weights that share a scale")
    symmetric: bool = option(False, choices=(False, True), help="zero point in the middle, not stored")
    head: str = option("int8", choices=("int8", "int4"), help="how the head and a tied embedding are held")

    @property
    def kind(self) -> str:
        return "symmetric" if self.symmetric else "asymmetric"


@dataclass(frozen=True)
class Int3(Int4):
    """The same with 8 points a group."""

    bits: ClassVar[int] = 3
    head: str = option("int8", choices=("int8", "int3"), help="how the head and a tied embedding are held")


@dataclass(frozen=True)
class Int2(Int4):
    """The same with 4 points a group."""

    bits: ClassVar[int] = 2
    head: str = option("int8", choices=("int8", "int2"), help="how the head and a tied embedding are held")


@dataclass(frozen=True)
class RTN(GroupedFormat):
    """Round to nearest on any grid: 2 to 8 bits, in groups, with a zero point, without, or with a float minimum."""

    bits: int = option(4, choices=(2, 3, 4, 5, 6, 8), help="bits a weight, scales not counted")
    group_size: int = option(64, choices=grid.GROUP_SIZES, help="weights that share a scale")
    kind: str = option("asymmetric", choices=grid.KINDS, help="what a group stores beside its scale")
    head: str = option("int8", choices=("int8", "same"), help="how the head and a tied embedding are held")
    panels: bool = field(default=False, repr=False)
    """Whether bytes are counted as a CPU's compiled step holds the codes, once it has laid them out."""

    def layer_nbytes(self, n_out: int, n_in: int, name: str = "") -> int:
        if not self.panels:
            return super().layer_nbytes(n_out, n_in)
        return size.panels_nbytes(n_out, n_in, bits=self.bits, group_size=self.group_size, kind=self.kind)

    def top_nbytes(self, n_out: int, n_in: int) -> int:
        if self.panels and self.head == "int8":
            return size.int8_panels_nbytes(n_out, n_in)
        return super().top_nbytes(n_out, n_in)

    def form(self) -> WeightFormat:
        return plainest(self.bits, self.group_size, self.kind, self.head)


def plainest(bits: int, group_size: int, kind: str, head: str) -> WeightFormat:
    """The same layout under the name that it has in the menu, where it has one: so that it is timed once."""
    named = {4: Int4, 3: Int3, 2: Int2}.get(bits)
    if named is None or kind == "minimum":
        return RTN(bits, group_size, kind, head)
    return named(group_size, kind == "symmetric", "int8" if head == "int8" else f"int{bits}")


def to_int8(linear: nn.Linear) -> Int8Linear:
    return Int8Linear(*grid.round_int8(linear.weight), linear.bias)


register_format("int8", Int8, summary="8 bits a weight, one scale a channel, rounded to nearest")
register_format("w8a8", W8A8, summary="int8, and the activations are rounded to 8 bits too")
register_format("int4", Int4, summary="4 bits a weight, one scale a group, rounded to nearest")
register_format("int3", Int3, summary="3 bits a weight, one scale a group, rounded to nearest")
register_format("int2", Int2, summary="2 bits a weight, one scale a group, rounded to nearest")
register_format("rtn", RTN, summary="Any bits, group and grid, rounded to nearest: what GPTQ and AWQ must beat")
