# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""The two ends of a step on the device: a token's row of the embedding, and the greedy choice of the next token.

The choice is written where the next step reads its token, and the position moves on: the host need not wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.triton.blocks import FIRST_KIND, PIECE, first_input, gap, row_halves
from labkit.kernels.triton.chain import await_previous, chained
from labkit.kernels.triton.dot import weights_at
from labkit.kernels.triton.product import Matrix

BLOCK = 1024
"""Values that one program looks at."""


@triton.jit
def _lookup(
    table, scales, zeros, token, out, n_in, stride, n_groups, factor,
    KIND: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    await_previous(CHAINED)
    row = tl.maximum(tl.load(token), 0).to(tl.int64)  # -1: none was chosen
    if KIND > FIRST_KIND:
        pieces = tl.program_id(0) * (BLOCK // PIECE) + tl.arange(0, BLOCK // PIECE)
        piece, lane = pieces[None, :, None], tl.arange(0, 16)[None, None, :]
        there = piece * PIECE < n_in
        low, high, s_low, s_high, m_low, m_high = row_halves(
            table, scales, row, piece, lane, n_in, there, KIND
        )  # fmt: skip
        at = out + first_input(piece, KIND) + lane
        tl.store(at, ((low * s_low + m_low) * factor).to(out.dtype.element_ty), mask=there)
        tl.store(at + gap(KIND), ((high * s_high + m_high) * factor).to(out.dtype.element_ty), mask=there)
    else:
        cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = cols < n_in
        y = weights_at(table, scales, zeros, row, cols, inside, stride, n_groups, KIND, GROUP, HAS_ZEROS)
        tl.store(out + cols, (y * factor).to(out.dtype.element_ty), mask=inside)


def lookup(table: Matrix, token: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
    """Row ``token`` (1,) of the table, times ``factor``, into ``out`` (M,)."""
    weight, scales, zeros, _ = table.addresses()
    _lookup[(triton.cdiv(table.n_in, BLOCK),)](
        weight, scales, zeros, token, out, table.n_in, table.stride, table.n_groups, factor, KIND=table.kind,
        GROUP=table.group, HAS_ZEROS=table.zeros is not None, BLOCK=BLOCK, **chained(out.device),
    )  # fmt: skip
    return out


@triton.jit
def _best_of_block(logits, best, where, n, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    await_previous(CHAINED)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(logits + at, mask=at < n, other=float("-inf")).to(tl.float32)
    v = tl.where(v == v, v, float("inf"))  # no number at all is the largest
    top = tl.max(v, axis=0)
    tl.store(best + tl.program_id(0), top)
    tl.store(where + tl.program_id(0), tl.min(tl.where(v == top, at, n), axis=0))


@triton.jit
def _best(best, where, token, position, history, n_blocks, n, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    await_previous(CHAINED)
    i = tl.arange(0, BLOCK)
    v = tl.load(best + i, mask=i < n_blocks, other=float("-inf"))
    at = tl.load(where + i, mask=i < n_blocks, other=n)
    top = tl.max(v, axis=0)
    chosen = tl.min(tl.where(v == top, at, n), axis=0)
    chosen = tl.where(tl.abs(top) < float("inf"), chosen, -1)
    following = tl.load(position) + 1
    tl.store(token, chosen)
    tl.store(position, following)
    tl.store(history + following, chosen)


class Chooser:
    """The first index of the largest logit becomes the next token."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.n_blocks = triton.cdiv(vocab_size, BLOCK)
        self.best = torch.empty(self.n_blocks, dtype=torch.float32, device=device)
        self.where = torch.empty(self.n_blocks, dtype=torch.int64, device=device)

    def __call__(self, logits: Tensor, token: Tensor, position: Tensor, history: Tensor) -> None:
        """From logits (V,): ``token`` (1,) int64, also at ``history[position + 1]``; -1 where they are not finite.
        ``position`` (1,) moves on."""
        n = logits.numel()
        _best_of_block[(self.n_blocks,)](logits, self.best, self.where, n, BLOCK=BLOCK, **chained(logits.device))
        _best[(1,)](
            self.best, self.where, token, position, history, self.n_blocks, n,
            BLOCK=triton.next_power_of_2(self.n_blocks), **chained(logits.device),
        )  # fmt: skip
