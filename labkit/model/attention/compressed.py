"""DeepSeek-V4's attention: a window of single tokens, and one row for every block of older ones.

    q_t  = norm_per_head(W_UQ c_t),  c_t = norm(W_DQ h_t)       (H, D)      no weight in the norm per head
    kv_t = norm(W_KV h_t)                                       (D,)        one row is key and value of all heads
    row_i = norm( sum over the rows j of block i:  s_j * kv_j ),   s = softmax over the rows, channel by channel

    CSA   blocks of 4; row i is made of blocks i-1 and i, each token giving one vector to its own block's row and
          another one to the next; an indexer chooses the top k rows that a query sees
    HCA   blocks of 128, no overlap, no choice: there are few rows

    o_h = softmax over [latest tokens ; rows ; sink_h]  of scale q_h . key     the sink takes weight and gives nothing

The last dims are turned, in pairs; row i at the position of its block's first token. A row's value is turned with it,
so what a head found is turned back by its own query's position. Token t sees row i when i < (t + 1) // rate.

Source: the V4 report (arXiv 2606.19348, section 2.3) and its inference code, which this follows where they differ: the
report prints i < t / rate, and gives the two halves of a CSA projection the other way round (the first half belongs to
the *next* block's row). Left out: the Hadamard turn of the indexer's vectors, which changes no product, and the
rounding to fp8 and fp4 that the model was trained with. transformers pools in the model's dtype; here, as in the
inference code, it is float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.kernels import ops
from labkit.kernels.selected import choose
from labkit.kvcache import Entry, LayerEntries
from labkit.model.config import CompressedAttention, Indexer, Norm
from labkit.model.norm import build_norm
from labkit.model.step import Step


def rotate_last(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the last dims of x (T, H, D) in pairs; cos and sin (T, R), 2 R <= D."""
    n = 2 * cos.shape[-1]
    kept, turned = x[..., :-n], ops.rotate(x[..., -n:], cos, sin, layout="interleaved")
    return torch.cat((kept, turned), dim=-1) if kept.shape[-1] else turned


class Compressor(nn.Module):
    """Makes one row (D,) of every block of ``rate`` tokens, and two such blocks with ``overlap``."""

    def __init__(self, d_model: int, d_row: int, config: CompressedAttention, norm: Norm) -> None:
        super().__init__()
        self.rate, self.overlap, self.rope = config.rate, config.overlap, config.rope
        width = d_row * (2 if config.overlap else 1)
        # Pooled in float32, whatever the model's dtype: parameters, so that nobody packs them into fewer bits.
        self.kv = nn.Parameter(torch.empty(width, d_model), requires_grad=False)
        self.gate = nn.Parameter(torch.empty(width, d_model), requires_grad=False)
        self.position_bias = nn.Parameter(torch.empty(config.rate, width), requires_grad=False)
        self.norm = build_norm(d_row, norm)

    @staticmethod
    def entries(name: str, d_row: int, config: CompressedAttention, d_value: int | None) -> tuple[Entry, Entry]:
        """The rows, and the latest tokens' vectors and gates, of which the open block's row will be made."""
        n_blocks = 2 if config.overlap else 1
        tail = Entry(f"{name}_open", (2, n_blocks * d_row), window=n_blocks * config.rate, dtype=torch.float32)
        return Entry(name, (d_row,), rate=config.rate, d_value=d_value), tail

    def forward(self, x: Tensor, step: Step, layer_idx: int, name: str) -> None:
        """Store what x (T, M) adds to the open blocks, and the rows of the blocks that close."""
        wide = x.float()
        both = torch.stack((F.linear(wide, self.kv.float()), F.linear(wide, self.gate.float())), dim=1)
        cache = step.cache
        with step.timer("kv_cache"):
            cache.append(layer_idx, **{f"{name}_open": both})
        made = []
        for s in cache.segments:
            blocks = s.closed(self.rate)
            if not blocks:
                continue
            kept, first = cache.rows(layer_idx, f"{name}_open", s)
            start = (blocks.start - self.overlap) * self.rate
            inside = kept[max(start, 0) - first : blocks.stop * self.rate - first]
            positions = torch.arange(blocks.start, blocks.stop, device=x.device) * self.rate
            made.append(self.pool(inside, padded=start < 0, dtype=x.dtype, step=step, positions=positions))
        if made:
            with step.timer("kv_cache"):
                cache.append(layer_idx, **{name: torch.cat(made)})

    def pool(self, inside: Tensor, *, padded: bool, dtype: torch.dtype, step: Step, positions: Tensor) -> Tensor:
        """Vectors and gates of whole blocks (n rate, 2, width) to rows (n, D); with overlap the first block gives its
        rows to the next only, unless there is none before it (``padded``)."""
        kv, gate = inside.unflatten(0, (-1, self.rate)).unbind(2)  # (blocks, rate, width)
        gate = gate + self.position_bias.float()
        if self.overlap:
            if padded:
                kv = torch.cat((torch.zeros_like(kv[:1]), kv))
                gate = torch.cat((torch.full_like(gate[:1], -torch.inf), gate))
            (kv_next, kv_own), (gate_next, gate_own) = kv.chunk(2, dim=-1), gate.chunk(2, dim=-1)
            kv = torch.cat((kv_next[:-1], kv_own[1:]), dim=1)  # (n, 2 rate, D)
            gate = torch.cat((gate_next[:-1], gate_own[1:]), dim=1)
        rows = self.norm((kv * gate.softmax(dim=1)).sum(1).to(dtype))
        cos, sin = (t.to(dtype) for t in step.angles_at(positions, self.rope, rows.shape[-1]))
        return rotate_last(rows[:, None], cos, sin)[:, 0]


class RowIndexer(nn.Module):
    """The lightning indexer over rows of its own, narrower ones of the same blocks."""

    def __init__(self, d_model: int, attention: CompressedAttention, config: Indexer, norm: Norm) -> None:
        super().__init__()
        self.config, self.rate = config, attention.rate
        self.q_proj = nn.Linear(attention.d_query, config.n_heads * config.d_head, bias=False)
        self.weights_proj = nn.Linear(d_model, config.n_heads, bias=False)
        self.compressor = Compressor(d_model, config.d_head, attention, norm)

    def forward(
        self, x: Tensor, squeezed: Tensor, angles: tuple[Tensor, Tensor], step: Step, layer_idx: int
    ) -> list[Tensor | None]:
        """For each sequence the rows that each of its queries sees."""
        config, cache = self.config, step.cache
        self.compressor(x, step, layer_idx, "index")
        q = rotate_last(self.q_proj(squeezed).unflatten(-1, (config.n_heads, config.d_head)), *angles)
        weights = self.weights_proj(x).float() * (config.n_heads * config.d_head) ** -0.5
        found = []
        for s in cache.segments:
            keys, at = cache.rows(layer_idx, "index", s)[0], s.rows
            found.append(choose(q[at], weights[at], keys, n_past=s.n_past, rate=self.rate, top_k=config.top_k))
        return found


class Attention(nn.Module):
    """A layer of DeepSeek-V4: CSA, HCA or the window alone, as its config says."""

    def __init__(self, d_model: int, config: CompressedAttention, norm: Norm) -> None:
        super().__init__()
        self.config, self.eps, self.scale = config, norm.eps, config.d_head**-0.5
        n_heads, d_head = config.n_heads, config.d_head
        self.q_a_proj = nn.Linear(d_model, config.d_query, bias=False)
        self.q_a_norm = build_norm(config.d_query, norm)
        self.q_b_proj = nn.Linear(config.d_query, n_heads * d_head, bias=False)
        self.kv_proj = nn.Linear(d_model, d_head, bias=False)
        self.kv_norm = build_norm(d_head, norm)
        self.sinks = nn.Parameter(torch.empty(n_heads), requires_grad=False)
        self.compressor = Compressor(d_model, d_head, config, norm) if config.rate else None
        self.indexer = RowIndexer(d_model, config, config.indexer, norm) if config.indexer else None
        d_in = n_heads * d_head // config.n_groups
        self.o_a = nn.Parameter(torch.empty(config.n_groups, config.d_group, d_in), requires_grad=False)
        self.o_b_proj = nn.Linear(config.n_groups * config.d_group, d_model, bias=False)

    @staticmethod
    def entries(config: CompressedAttention) -> LayerEntries:
        """The window's tokens; the rows, and the indexer's, each with an open block."""
        kept = [Entry("kv", (config.d_head,), window=config.window, d_value=config.d_head)]
        if config.rate:
            kept += Compressor.entries("row", config.d_head, config, config.d_head)
        if config.indexer is not None:
            kept += Compressor.entries("index", config.indexer.d_head, config, None)
        return LayerEntries(tuple(kept))

    def forward(self, x: Tensor, step: Step, layer_idx: int) -> Tensor:
        config, cache = self.config, step.cache
        cos, sin = step.angles(config.rope, config.d_head, x.dtype)
        squeezed = self.q_a_norm(self.q_a_proj(x))
        q = self.q_b_proj(squeezed).unflatten(-1, (config.n_heads, config.d_head))  # (T, H, D)
        q = rotate_last(F.rms_norm(q.float(), (config.d_head,), eps=self.eps).to(x.dtype), cos, sin)
        kv = rotate_last(self.kv_norm(self.kv_proj(x))[:, None], cos, sin)[:, 0]
        with step.timer("kv_cache"):
            cache.append(layer_idx, kv=kv)
        if self.compressor is not None:
            self.compressor(x, step, layer_idx, "row")
        chosen = None
        if self.indexer is not None:
            chosen = {"row": self.indexer(x, squeezed, (cos, sin), step, layer_idx)}
        out = cache.attend_rows(layer_idx, q, scale=self.scale, chosen=chosen, sinks=self.sinks)
        out = rotate_last(out, cos, -sin).flatten(1).unflatten(-1, (config.n_groups, -1))  # (T, groups, H/groups D)
        return self.o_b_proj(torch.einsum("tgd,grd->tgr", out, self.o_a).flatten(1))
