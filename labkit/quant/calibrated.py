"""Formats whose integers a text helps to choose: GPTQ and AWQ, as configs. The walk over a model with that text stands
in ``labkit.checkpoint.calibrate``; here is what is done to one block once its inputs are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from labkit.quant import awq, gptq, grid
from labkit.quant.format import WeightFormat, replace_head
from labkit.quant.grid import Grid
from labkit.quant.grouped import linear_of
from labkit.quant.linear import PackedLinear
from labkit.quant.rtn import GroupedFormat, plainest
from labkit.registry import option, register

KINDS = ("asymmetric", "symmetric")
"""The grids that compressed-tensors can store: a float minimum is ggml's."""


class Site(NamedTuple):
    """An input of a block that some linears share, and what the calibration saw there."""

    names: tuple[str, ...]
    """The linears, as the block names them."""
    hessian: Tensor
    """X X^T / T (K, K) float32, over T tokens."""
    mean_abs: Tensor
    """(K,) mean |x|."""


class Calibrated(GroupedFormat):
    """A grouped format whose codes are chosen block by block. ``text`` None: the default calibration text."""

    calibrates: ClassVar[bool] = True
    text: str | None
    n_tokens: int

    def form(self) -> WeightFormat:
        return plainest(self.bits, self.group_size, self.kind, self.head)

    def layer(self, name: str, linear: nn.Linear) -> PackedLinear:
        raise ValueError(_NEEDS_TEXT.format(type(self).__name__))

    def top(self, linear: nn.Linear) -> PackedLinear:
        return self.form().top(linear)

    def quantize(self, block: Any, linears: dict[str, nn.Linear], sites: Sequence[Site]) -> dict[str, PackedLinear]:
        """The block's linears, packed; ``block`` may be changed where that changes nothing it computes."""
        raise NotImplementedError


_NEEDS_TEXT = "{} chooses its integers by a text: load a model with it (labkit.load(..., weights=...)), or choose RTN."


@dataclass(frozen=True)
class GPTQ(Calibrated):
    """Error compensation, column by column (``gptq``)."""

    bits: int = option(4, choices=(2, 3, 4, 8), help="bits a weight, scales not counted")
    group_size: int = option(64, choices=grid.GROUP_SIZES, help="weights that share a scale")
    kind: str = option("asymmetric", choices=KINDS, help="with a stored zero point, or without")
    act_order: bool = option(True, choices=(False, True), help="largest inputs first")
    clip: bool = option(True, choices=(False, True), help="search how far to cut each group's outliers")
    damping: float = option(0.01, low=0.001, high=1.0, step=0.001, help="share of the mean input added to each")
    head: str = option("int8", choices=("int8", "same"), help="how the head and a tied embedding are held")
    n_tokens: int = option(8192, low=512, high=131_072, step=512, help="tokens of calibration text")
    text: str | None = field(default=None, repr=False)

    def quantize(self, block: Any, linears: dict[str, nn.Linear], sites: Sequence[Site]) -> dict[str, PackedLinear]:
        made: dict[str, PackedLinear] = {}
        for site in sites:
            order = gptq.order_of(site.hessian, damping=self.damping, act_order=self.act_order)
            parts = [linears[name].weight for name in site.names]
            found = gptq.round_columns(
                torch.cat(parts), order, Grid(self.bits, self.kind), self.group_size, clip=self.clip
            )
            at = 0
            for name, part in zip(site.names, parts, strict=True):
                made[name] = linear_of(found.rows(slice(at, at + len(part))), linears[name].bias)
                at += len(part)
        return made


@dataclass(frozen=True)
class AWQ(Calibrated):
    """Activation-aware scaling and clipping (``awq``)."""

    bits: int = option(4, choices=(2, 3, 4, 8), help="bits a weight, scales not counted")
    group_size: int = option(64, choices=grid.GROUP_SIZES, help="weights that share a scale")
    kind: str = option("asymmetric", choices=KINDS, help="with a stored zero point, or without")
    clip: bool = option(True, choices=(False, True), help="search how far to cut each group's outliers")
    head: str = option("int8", choices=("int8", "same"), help="how the head and a tied embedding are held")
    n_tokens: int = option(8192, low=512, high=131_072, step=512, help="tokens of calibration text")
    text: str | None = field(default=None, repr=False)

    def quantize(self, block: Any, linears: dict[str, nn.Linear], sites: Sequence[Site]) -> dict[str, PackedLinear]:
        on, made = Grid(self.bits, self.kind), {}
        hessians = {}
        for site in sites:
            hessian, scales = site.hessian, None
            giver = giver_of(block, site.names)
            if giver is not None:
                weights = [linears[name].weight for name in site.names]
                scales, _ = awq.search_scales(weights, hessian, site.mean_abs, on, self.group_size)
                fold(giver, scales)
                for weight in weights:
                    weight.data.mul_(scales)
                hessian = hessian / (scales[:, None] * scales)
            hessians |= dict.fromkeys(site.names, hessian)
        for name, hessian in hessians.items():
            weight = linears[name].weight
            if self.clip and not name.endswith(("q_proj", "k_proj")):
                weight = awq.search_clip(weight, hessian, on, self.group_size)
            made[name] = linear_of(on.nearest(weight, self.group_size), linears[name].bias)
        return made


def giver_of(block: Any, names: Sequence[str]) -> Any:
    """The norm or the linear of ``block`` whose output is these linears' input and nobody else's, or None.

    A norm before attention or before a dense FFN; the up projection before the down projection of a gated FFN (the
    product with the gate is linear in it); the value projection before the output projection, where every query head
    has a value head of its own."""
    first, normed = names[0], getattr(block, "norms", "") in ("pre", "sandwich")
    if first == "attention.q_proj" and normed:
        return block.attention_norm
    if first in ("ffn.gate_proj", "ffn.up_proj") and normed:
        return block.ffn_norm
    if first == "ffn.down_proj" and block.ffn.gate_proj is not None:
        return block.ffn.up_proj
    if first == "attention.o_proj":
        value = getattr(block.attention, "v_proj", None)
        own_heads = value is not None and value.out_features == block.attention.o_proj.in_features
        return value if own_heads else None
    return None


def fold(giver: Any, scales: Tensor) -> None:
    """Divide what ``giver`` puts out by ``scales``, in place."""
    weight, bias = giver.weight.data, getattr(giver, "bias", None)
    if isinstance(giver, nn.Linear):
        weight.div_(scales[:, None].to(weight.dtype))
    elif getattr(giver, "unit_offset", False):
        weight.copy_((weight + 1.0) / scales.to(weight.dtype) - 1.0)
    else:
        weight.div_(scales.to(weight.dtype))
    if bias is not None:
        bias.data.div_(scales.to(bias.dtype))


def _register(name: str, config: type[Calibrated], summary: str) -> None:
    def build(config: Calibrated, *, transformer: Any, calibrate: Any = None) -> Any:
        """``calibrate(config, transformer)`` packs the layers in place: ``labkit.checkpoint.calibrate.walk``."""
        if calibrate is None:
            raise ValueError(_NEEDS_TEXT.format(type(config).__name__))
        calibrate(config, transformer)
        return replace_head(transformer, config.top)

    register("weights", name, config=config, summary=summary)(build)


_register("gptq-int4", GPTQ, "4 bits by GPTQ: each column's error is made up for by the next ones; takes a text")
_register("awq-int4", AWQ, "4 bits by AWQ: inputs that are large get a finer place on the grid; takes a text")
