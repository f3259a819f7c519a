"""Attention over keys of several rates, some of them chosen, with a sink: what compressed and sparse attention share.

    p_j = e^(z_j) / (sum over k of e^(z_k) + e^(sink_h))      z = scale q . key_j over all keys that a query may see
    o   = sum of p_j value_j                                  value_j = the first numbers of key_j: one row is both

and the lightning indexer, which chooses them (DeepSeek-V3.2, arXiv 2512.02556, eq. 1):

    I_{t,s} = sum over heads of w_{t,h} ReLU(q_{t,h} . k_s);  the top k rows s that token t may see

Queries go through in blocks, so nothing of size T x S stands in memory. T queries, S rows, H heads, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_VALUES = 1 << 21
"""Numbers of one block's largest tensor: queries are taken so many at a time that this is not exceeded."""


@dataclass(frozen=True)
class Keys:
    """Rows (S, D) that are keys, and with their first ``d_value`` numbers values. Row i is number ``first + i``."""

    rows: Tensor
    d_value: int
    first: int = 0
    rate: int = 1
    window: int | None = None
    """Numbers a query sees at most, the latest ones; None: all that are closed."""
    chosen: Tensor | None = None
    """(T, n) numbers that each query sees, -1 for none."""

    def width(self, n_new: int) -> int:
        """Scores of one query in a block of ``n_new``."""
        if self.chosen is not None:
            return self.chosen.shape[1]
        return len(self.rows) if self.window is None else min(len(self.rows), self.window + n_new)


def attend(q: Tensor, keys: list[Keys], *, n_past: int, scale: float, sinks: Tensor | None = None) -> Tensor:
    """q (T, H, D), the queries of positions n_past ... n_past + T - 1, over all ``keys`` at once: (T, H, d_value).

    A query at position t sees row i of rate m when i < (t + 1) // m: the blocks that are closed with it.
    """
    n_new, n_heads, _ = q.shape
    # A block of queries reads a window of its own length and as much again, so 128 keep that part small too.
    n_wide = max(max(part.width(128) for part in keys) * n_heads, 1)
    gathered = max((part.chosen.shape[1] * part.rows.shape[-1] for part in keys if part.chosen is not None), default=1)
    block = max(1, min(128, BLOCK_VALUES // max(n_wide, gathered)))
    if n_new <= block:
        return _attend(q, keys, 0, n_past, scale, sinks)
    return torch.cat([_attend(q[a : a + block], keys, a, n_past + a, scale, sinks) for a in range(0, n_new, block)])


def _attend(q: Tensor, keys: list[Keys], row: int, n_past: int, scale: float, sinks: Tensor | None) -> Tensor:
    """One block of queries, the first of them row ``row`` of the step and at position ``n_past``."""
    scored = [_score(q, part, row, n_past, scale) for part in keys]
    joined = torch.cat([scores for scores, _ in scored], dim=-1) if len(scored) > 1 else scored[0][0]  # (T, H, S)
    if sinks is not None:
        sink = sinks.float()[:, None].expand(*joined.shape[:2], 1)
        joined = torch.cat((joined, sink), dim=-1)
    weights = joined.softmax(-1).to(q.dtype)
    out, start = None, 0
    for scores, value in scored:
        share = weights[..., start : start + scores.shape[-1]]
        # Rows that all queries share are one product; rows that each query chose are one a query.
        mixed = share @ value if value.ndim == 2 else torch.bmm(share, value)
        out = mixed if out is None else out + mixed
        start += scores.shape[-1]
    assert out is not None
    return out


def _score(q: Tensor, part: Keys, row: int, n_past: int, scale: float) -> tuple[Tensor, Tensor]:
    """Scores (T, H, S) float32, -inf where a query does not see, and values (S, d_value) or (T, S, d_value)."""
    n_new = len(q)
    if part.chosen is not None:
        chosen = part.chosen[row : row + n_new]
        picked = part.rows[(chosen - part.first).clamp(min=0)]  # (T, n, D)
        scores = torch.bmm(q, picked.transpose(1, 2)).float() * scale
        return scores.masked_fill((chosen < 0)[:, None], -torch.inf), picked[..., : part.d_value]
    last = (n_past + n_new) // part.rate  # numbers from here on are closed for no query of the block
    low = part.first if part.window is None else max(part.first, (n_past + 1) // part.rate - part.window)
    rows = part.rows[low - part.first : last - part.first]
    scores = (q @ rows.T).float() * scale
    seen = torch.arange(n_past + 1, n_past + n_new + 1, device=q.device)[:, None] // part.rate  # first number not seen
    numbers = torch.arange(low, low + len(rows), device=q.device)
    if n_new > 1 or (part.window is not None and len(rows) > part.window):
        hidden = numbers >= seen
        if part.window is not None:
            hidden |= numbers < seen - part.window
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
    return scores, rows[:, : part.d_value]


def choose(q: Tensor, weights: Tensor, rows: Tensor, *, n_past: int, rate: int, top_k: int) -> Tensor | None:
    """The rows that each query sees: (T, top_k) numbers, -1 for none; None when no query has more than ``top_k``.

    q (T, H, D) and weights (T, H) of the indexer, rows (S, D) its keys; the scales are in ``weights``. Scores are
    taken in float32: two rows that differ by little must not trade places by rounding. Which of two exactly equal ones
    is taken is left open (an indexer of few heads gives many a score of 0).
    """
    n_new, n_heads, _ = q.shape
    if (n_past + n_new) // rate <= top_k:
        return None
    block = max(1, min(128, BLOCK_VALUES // (n_heads * max(len(rows), 1))))
    keys = rows.float().T
    found = []
    for a in range(0, n_new, block):
        asked = q[a : a + block].float()
        first, n = n_past + a, len(asked)
        n_closed = (first + n) // rate
        scores = torch.bmm(weights[a : a + block].float()[:, None], (asked @ keys[:, :n_closed]).relu_())[:, 0]
        seen = torch.arange(first + 1, first + n + 1, device=q.device)[:, None] // rate
        if n > 1:
            scores = scores.masked_fill_(torch.arange(n_closed, device=q.device) >= seen, -torch.inf)
        if n_closed <= top_k:
            numbers = torch.arange(top_k, device=q.device).expand(n, top_k)
        else:
            numbers = scores.topk(top_k, dim=-1).indices
        found.append(numbers.masked_fill(numbers >= seen, -1))
    return torch.cat(found)
