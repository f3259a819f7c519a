# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false

"""Products of one token with a layer's weights, as they are stored: bound by the bytes, so each is read once.

    project   W g(x) of up to three matrices, one after the other     g: the RMSNorm before them, or nothing
    add       x + W y, in place
    gated     silu(Wg g(x)) * (Wu g(x))

The norm costs no pass of its own: its mean is gathered along the way, and 1 / rms multiplies the finished sums.
Weights are float32, bf16, float16, int8 rows, int4 panels (``dot``) or a file's own blocks (``blocks``). Sums are
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.triton import elementwise
from labkit.kernels.triton.blocks import FIRST_KIND, dot_blocks
from labkit.kernels.triton.chain import chained
from labkit.kernels.triton.dot import TWO_23, dot_panels, dot_rows, side_by_side


@triton.jit
def _row(w, row, n_out, stride):
    return w + tl.minimum(row, n_out - 1).to(tl.int64) * stride


@triton.jit
def _project(
    x, gain, residual, out, w0, s0, z0, b0, n0, w1, s1, z1, b1, n1, w2, s2, z2, b2, n2, n_in, stride, n_groups, eps,
    two_23,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, VEC: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, NORMED: tl.constexpr, UNIT_OFFSET: tl.constexpr, BIASED: tl.constexpr,
    ADDED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one of up to three matrices, for one token: out (T, n0 + n1 + n2)."""
    tile, t = tl.program_id(0), tl.program_id(1)
    w, s, z, b, n_out, to = w0, s0, z0, b0, n0, n0 * 0
    before = tl.cdiv(n0, ROWS)
    if tile >= before:
        tile -= before
        before = tl.cdiv(n1, ROWS)
        if tile < before:
            w, s, z, b, n_out, to = w1, s1, z1, b1, n1, n0
        else:
            tile -= before
            w, s, z, b, n_out, to = w2, s2, z2, b2, n2, n0 + n1
    rows = tile * ROWS + tl.arange(0, ROWS)
    if KIND == 4:
        at, cell = tile.to(tl.int64) * stride, tile.to(tl.int64) * n_groups
        y, _ = dot_panels(
            x + t * n_in, gain, w + at, s + cell, z + cell, w, s, z, n_in, eps, two_23,
            1, COLS, VEC, GROUP, HAS_ZEROS, NORMED, UNIT_OFFSET, CHAINED,
        )  # fmt: skip
    elif KIND > FIRST_KIND:  # rows beyond the last are the last again: nobody stores what comes of them
        exist = tl.minimum(rows, n_out - 1).to(tl.int64)
        y = dot_blocks(x + t * n_in, gain, w, s, exist, n_in, eps, KIND, COLS, NORMED, UNIT_OFFSET, CHAINED)
    else:
        y0, y1, y2, y3 = dot_rows(
            x + t * n_in, gain, _row(w, tile * ROWS, n_out, stride), _row(w, tile * ROWS + 1, n_out, stride),
            _row(w, tile * ROWS + 2, n_out, stride), _row(w, tile * ROWS + 3, n_out, stride), n_in, eps, two_23,
            ROWS, COLS, VEC, KIND == 8, NORMED, UNIT_OFFSET, CHAINED,
        )  # fmt: skip
        y = side_by_side(y0, y1, y2, y3, tl.arange(0, ROWS))
        if KIND == 8:
            y *= tl.load(s + rows, mask=rows < n_out, other=0.0)
    there = rows < n_out
    if BIASED:
        y += tl.load(b + rows, mask=there, other=0.0).to(tl.float32)
    at = t * (n0 + n1 + n2) + to + rows
    if ADDED:
        y += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=there)


@triton.jit
def _gated(
    x, gain, out, w0, s0, z0, b0, w1, s1, z1, b1, n_out, n_in, stride, n_groups, eps, two_23,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, VEC: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, NORMED: tl.constexpr, UNIT_OFFSET: tl.constexpr, BIASED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Two rows, or a panel, of the gate and the same of the up projection, in one pass over x."""
    tile = tl.program_id(0)
    rows = tile * ROWS + tl.arange(0, ROWS)
    if KIND == 4:
        at, cell = tile.to(tl.int64) * stride, tile.to(tl.int64) * n_groups
        g, u = dot_panels(
            x, gain, w0 + at, s0 + cell, z0 + cell, w1 + at, s1 + cell, z1 + cell, n_in, eps, two_23,
            2, COLS, VEC, GROUP, HAS_ZEROS, NORMED, UNIT_OFFSET, CHAINED,
        )  # fmt: skip
    elif KIND > FIRST_KIND:
        exist = tl.minimum(rows, n_out - 1).to(tl.int64)
        g = dot_blocks(x, gain, w0, s0, exist, n_in, eps, KIND, COLS, NORMED, UNIT_OFFSET, CHAINED)
        u = dot_blocks(x, gain, w1, s1, exist, n_in, eps, KIND, COLS, NORMED, UNIT_OFFSET, False)
    else:
        y0, y1, y2, y3 = dot_rows(
            x, gain, _row(w0, tile * 2, n_out, stride), _row(w0, tile * 2 + 1, n_out, stride),
            _row(w1, tile * 2, n_out, stride), _row(w1, tile * 2 + 1, n_out, stride), n_in, eps, two_23,
            4, COLS, VEC, KIND == 8, NORMED, UNIT_OFFSET, CHAINED,
        )  # fmt: skip
        first = tl.arange(0, ROWS) == 0
        g, u = tl.where(first, y0, y1), tl.where(first, y2, y3)
        if KIND == 8:
            g *= tl.load(s0 + rows, mask=rows < n_out, other=0.0)
            u *= tl.load(s1 + rows, mask=rows < n_out, other=0.0)
    there = rows < n_out
    if BIASED:
        g += tl.load(b0 + rows, mask=there, other=0.0).to(tl.float32)
        u += tl.load(b1 + rows, mask=there, other=0.0).to(tl.float32)
    tl.store(out + rows, (g / (1.0 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=there)


class Matrix(NamedTuple):
    """One matrix's weights as the kernels take them. ``kind``: 16 numbers, 8 int8 rows, 4 int4 panels; from 100 on
    ggml's blocks, under its own number more than 100 (``scales``: the same bytes as float16)."""

    kind: int
    weight: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    n_out: int
    n_in: int
    group: int

    @classmethod
    def of(cls, linear: Any) -> Matrix:
        """From a plain linear layer, or a packed one that says its ``gpu_kind``."""
        weight, n_out, n_in = linear.weight, linear.out_features, linear.in_features
        kind = getattr(linear, "gpu_kind", 16)
        if kind == 4:
            return cls.packed(weight, linear.scales, linear.zeros, linear.bias, n_out, n_in, linear.group_size)
        if kind > FIRST_KIND.value:
            return cls(kind, weight, weight.view(torch.float16), None, linear.bias, n_out, n_in, 64)
        scales = linear.scales if kind == 8 else weight
        return cls(kind, weight, scales, None, linear.bias, n_out, n_in, 64)

    @classmethod
    def packed(
        cls,
        weight: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        n_out: int,
        n_in: int,
        group: int,
    ) -> Matrix:
        """int4 as ``quant.grid`` packs it. A group's four scales become one number to load, its zero points another."""
        zeros = None if zeros is None else zeros.view(torch.int32)[..., 0]
        return cls(4, weight.view(torch.int16), scales.view(torch.int64)[..., 0], zeros, bias, n_out, n_in, group)

    @property
    def in_blocks(self) -> bool:
        """Whether these are ggml's blocks."""
        return self.kind > FIRST_KIND.value

    @property
    def stride(self) -> int:
        """Elements from one row, or panel, to the next."""
        return self.weight.stride(0)

    @property
    def n_groups(self) -> int:
        return self.scales.shape[1] if self.kind == 4 else 0

    def addresses(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weights, scales, zeros and bias; where there is none, something that is never read."""
        return (
            self.weight,
            self.scales,
            self.scales if self.zeros is None else self.zeros,
            self.scales if self.bias is None else self.bias,
        )


class Tile(NamedTuple):
    """How one program is cut: ``rows`` at once (``gated`` has its own number), ``cols`` a turn of its loop."""

    rows: int
    cols: int
    warps: int


def tile_for(kind: int, n_out: int) -> Tile:
    """Wide enough that a program's first loads cover its rows; few enough rows that every processor has work."""
    if kind == 4:
        return Tile(4, 1024, 1)
    if kind > FIRST_KIND.value:  # chosen like int4's; never timed
        return Tile(4, 1024, 2)
    if kind == 8:
        return Tile(4, 512, 1) if n_out > 16_384 else Tile(4, 1024, 2)
    return Tile(4, 512, 2) if n_out > 16_384 else Tile(2, 1024, 4)


def _form(m: Matrix) -> tuple[Any, ...]:
    """What matrices must have in common for one launch."""
    return m.kind, m.weight.dtype, m.n_in, m.group, m.zeros is None, m.bias is None, m.stride


def _check_alike(matrices: Sequence[Matrix]) -> None:
    """Raise ValueError where one launch would read a matrix as if it were another's form."""
    forms = {_form(m) for m in matrices}
    if len(forms) != 1:
        raise ValueError(f"matrices of different forms do not share a launch: {forms}")


def _options(matrix: Matrix, x: Tensor) -> dict[str, Any]:
    """What the weights' form decides, and how a kernel is launched: close after the one before it."""
    return {
        "KIND": matrix.kind,
        "VEC": 16 // x.element_size(),
        "GROUP": matrix.group,
        "HAS_ZEROS": matrix.zeros is not None,
        "BIASED": matrix.bias is not None,
        "enable_fp_fusion": True,
        **chained(x.device),
    }


def _norm_of(norm: Any, x: Tensor) -> tuple[Tensor, float, bool, bool]:
    """Weight, eps, whether the weight is stored less 1, and whether there is a norm."""
    return (x, 0.0, False, False) if norm is None else (norm.weight, norm.eps, norm.unit_offset, True)


def project(
    x: Tensor, matrices: Sequence[Matrix], out: Tensor, *, norm: Any = None, residual: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """``out`` (T, N of all) = W norm(x) (+ residual) for x (T, K), T small; out may be the residual itself."""
    first = matrices[0]
    _check_alike(matrices)
    rows, cols, warps = tile or tile_for(first.kind, first.n_out)
    gain, eps, unit_offset, normed = _norm_of(norm, x)
    three = [(*m.addresses(), m.n_out) for m in matrices]
    three += [(*first.addresses(), 0)] * (3 - len(three))
    grid = (sum(triton.cdiv(m.n_out, rows) for m in matrices), x.numel() // first.n_in)
    _project[grid](
        x, gain, out if residual is None else residual, out, *three[0], *three[1], *three[2], first.n_in, first.stride,
        first.n_groups, eps, TWO_23, ROWS=rows, COLS=cols, num_warps=warps, NORMED=normed, UNIT_OFFSET=unit_offset,
        ADDED=residual is not None, **_options(first, x),
    )  # fmt: skip
    return out


def gated(x: Tensor, gate: Matrix, up: Matrix, out: Tensor, *, norm: Any = None, tile: Tile | None = None) -> Tensor:
    """``out`` (d_ff,) = silu(Wg norm(x)) * (Wu norm(x)) of one token x (K,)."""
    _check_alike((gate, up))
    rows, cols, warps = tile or tile_for(gate.kind, gate.n_out)
    if not gate.in_blocks:
        rows = 4 if gate.kind == 4 else 2
    gain, eps, unit_offset, normed = _norm_of(norm, x)
    _gated[(triton.cdiv(gate.n_out, rows),)](
        x, gain, out, *gate.addresses(), *up.addresses(), gate.n_out, gate.n_in, gate.stride, gate.n_groups, eps,
        TWO_23, ROWS=rows, COLS=cols, num_warps=warps, NORMED=normed, UNIT_OFFSET=unit_offset, **_options(gate, x),
    )  # fmt: skip
    return out


def project_mixed(x: Tensor, matrices: Sequence[Matrix], out: Tensor, *, norm: Any = None) -> Tensor:
    """``project`` of one token x (K,) where neighbours may differ in form: a launch for each run of one form."""
    at = 0
    for _, run in groupby(matrices, _form):
        alike = list(run)
        n = sum(m.n_out for m in alike)
        project(x, alike, out[at : at + n], norm=norm)
        at += n
    return out


def gated_mixed(x: Tensor, gate: Matrix, up: Matrix, out: Tensor, *, norm: Any = None) -> Tensor:
    """``gated`` of one token x (K,) where gate and up may differ in form."""
    if _form(gate) == _form(up):
        return gated(x, gate, up, out, norm=norm)
    both = project_mixed(x, (gate, up), x.new_empty(gate.n_out + up.n_out), norm=norm)
    return out.copy_(elementwise.gate(both[: gate.n_out], both[gate.n_out :]))
