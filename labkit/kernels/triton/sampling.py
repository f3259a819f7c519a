# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Greedy choice on the device: the next id is written where the next step reads it, and the host need not wait."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _best_of_block(logits, best, where, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(logits + at, mask=at < n, other=float("-inf")).to(tl.float32)
    top = tl.max(v, axis=0)
    tl.store(best + tl.program_id(0), top)
    tl.store(where + tl.program_id(0), tl.min(tl.where(v == top, at, n), axis=0))


@triton.jit
def _best(best, where, out, n_blocks, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(best + i, mask=i < n_blocks, other=float("-inf"))
    at = tl.load(where + i, mask=i < n_blocks, other=n)
    tl.store(out, tl.min(tl.where(v == tl.max(v, axis=0), at, n), axis=0))


def argmax(logits: Tensor, out: Tensor) -> Tensor:
    """The first index of the largest of logits (V,), into ``out`` (1,) int64 on the same device."""
    n = logits.numel()
    n_blocks = triton.cdiv(n, 1024)
    best = torch.empty(n_blocks, dtype=torch.float32, device=logits.device)
    where = torch.empty(n_blocks, dtype=torch.int64, device=logits.device)
    _best_of_block[(n_blocks,)](logits.contiguous(), best, where, n, BLOCK=1024)
    _best[(1,)](best, where, out, n_blocks, n, BLOCK=triton.next_power_of_2(n_blocks))
    return out
