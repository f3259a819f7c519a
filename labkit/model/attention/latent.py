"""Latent attention: a token keeps one narrow vector, from which every head's key and value can be made.

    c   = norm(W_DKV x)                      (T, L)        the latent, and all that is kept beside ...
    k_r = rope(W_KR x)                       (T, R)        ... one turned key for all heads
    q   = W_UQ norm(W_DQ x) = [q_c ; rope(q_r)]            (T, H, N + R)

    expanded   k_h = [W_UK,h c ; k_r],  v_h = W_UV,h c;   o_h = softmax(scale q_h k_h^T) v_h
    absorbed   q'_h = [W_UK,h^T q_c ; q_r];   o_h = W_UV,h (softmax(scale q'_h [c ; k_r]^T) c)

The two are one computation with its brackets set differently: q . (W c) = (W^T q) . c. Expanded makes keys and values
for all tokens first, and then multiplies narrow ones: cheaper for a long prompt. Absorbed never makes them: a decode
step reads L + R numbers a token, whatever the number of heads. Sources: DeepSeek-V2 (arXiv 2405.04434, section 2.1).

With an indexer a query sees only the ``top_k`` tokens that it chooses: DeepSeek-V3.2 (arXiv 2512.02556, section 2.1).
Choosing takes a narrow score for *every* past token, so its cost still grows with the context, at a lower price.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.kernels import ops
from labkit.kernels.selected import choose
from labkit.kvcache import Entry, LayerEntries, Segment
from labkit.model.config import Indexer, LatentAttention, Norm
from labkit.model.norm import build_norm
from labkit.model.step import Step

NORM = Norm(eps=1e-6)
"""The norms inside: DeepSeek's code gives them an epsilon of their own."""


class LightningIndexer(nn.Module):
    """I_{t,s} = sum over heads of w_{t,h} ReLU(q_{t,h} . k_s), with one narrow key a token."""

    def __init__(self, d_model: int, d_query: int, config: Indexer) -> None:
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(d_query, config.n_heads * config.d_head, bias=False)
        self.k_proj = nn.Linear(d_model, config.d_head, bias=False)
        self.k_norm = build_norm(config.d_head, Norm("layer", eps=1e-6, bias=True))
        self.weights_proj = nn.Linear(d_model, config.n_heads, bias=False)

    def forward(self, x: Tensor, squeezed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (T, M) and the squeezed query (T, Q) to q (T, H, D), w (T, H) with the scales, and k (T, D).

        The first dims are turned, in halves: not the last ones in pairs, as the attention's own are."""
        config = self.config
        q = self.q_proj(squeezed).unflatten(-1, (config.n_heads, config.d_head))
        q = ops.rotate(q, cos, sin)
        k = ops.rotate(self.k_norm(self.k_proj(x))[:, None], cos, sin)[:, 0]
        weights = self.weights_proj(x).float() * (config.n_heads * config.d_head) ** -0.5
        return q, weights, k


class Attention(nn.Module):
    """``o_proj`` of what every head found, each with keys and values made of the same latents."""

    def __init__(self, d_model: int, config: LatentAttention, norm: Norm) -> None:
        super().__init__()
        self.config = config
        n_heads, d_query = config.n_heads, config.d_query
        if d_query is None:
            self.q_proj = nn.Linear(d_model, n_heads * config.d_head, bias=False)
        else:
            self.q_a_proj = nn.Linear(d_model, d_query, bias=config.bias)
            self.q_a_norm = build_norm(d_query, NORM)
            self.q_b_proj = nn.Linear(d_query, n_heads * config.d_head, bias=False)
        self.kv_a_proj = nn.Linear(d_model, config.d_latent + config.d_rope, bias=config.bias)
        self.kv_a_norm = build_norm(config.d_latent, NORM)
        # Not linears: absorbing needs the numbers themselves, head by head.
        self.k_up = nn.Parameter(torch.empty(n_heads, config.d_nope, config.d_latent), requires_grad=False)
        self.v_up = nn.Parameter(torch.empty(n_heads, config.d_value, config.d_latent), requires_grad=False)
        self.o_proj = nn.Linear(n_heads * config.d_value, d_model, bias=config.bias)
        self.indexer = None
        if config.indexer is not None:
            self.indexer = LightningIndexer(d_model, d_query or d_model, config.indexer)
        self.scale = config.scale if config.scale is not None else config.d_head**-0.5

    @staticmethod
    def entries(config: LatentAttention) -> LayerEntries:
        """The latent and the turned key side by side: a key whose first ``d_latent`` numbers are its value."""
        kept = [Entry("latent", (config.d_latent + config.d_rope,), d_value=config.d_latent)]
        if config.indexer is not None:
            kept.append(Entry("index", (config.indexer.d_head,)))
        return LayerEntries(tuple(kept))

    def forward(self, x: Tensor, step: Step, layer_idx: int) -> Tensor:
        config, cache = self.config, step.cache
        squeezed = x if config.d_query is None else self.q_a_norm(self.q_a_proj(x))
        q = (self.q_proj if config.d_query is None else self.q_b_proj)(squeezed)
        q_c, q_r = q.unflatten(-1, (config.n_heads, config.d_head)).split([config.d_nope, config.d_rope], dim=-1)
        latent, k_r = self.kv_a_proj(x).split([config.d_latent, config.d_rope], dim=-1)
        cos = sin = x.new_empty(0)
        if config.rope is not None:
            cos, sin = step.angles(config.rope, config.d_rope, x.dtype)
            q_r = ops.rotate(q_r, cos, sin, layout=config.rope.layout)
            k_r = ops.rotate(k_r[:, None], cos, sin, layout=config.rope.layout)[:, 0]
        with step.timer("kv_cache"):
            cache.append(layer_idx, latent=torch.cat((self.kv_a_norm(latent), k_r), dim=-1))
        chosen = None
        if self.indexer is not None:
            chosen = self._choose(self.indexer, x, squeezed, cos, sin, step, layer_idx)
        if chosen is None and self.expands(step):
            outs = [self._expanded(q_c[s.rows], q_r[s.rows], step, layer_idx, s) for s in cache.segments]
            return self.o_proj(torch.cat(outs).flatten(1))
        asked = torch.cat((torch.einsum("thn,hnl->thl", q_c, self.k_up), q_r), dim=-1)  # (T, H, L + R)
        mixed = cache.attend_rows(layer_idx, asked, scale=self.scale, chosen=chosen)  # (T, H, L)
        return self.o_proj(torch.einsum("thl,hvl->thv", mixed, self.v_up).flatten(1))

    def expands(self, step: Step) -> bool:
        """Whether making all keys and values costs less than wide scores: H (N + V) L a stored token against
        H (2 L + R - (N + R) - V) a pair of a new and a stored one, half of the pairs hidden in a first step."""
        config = self.config
        make = (config.d_nope + config.d_value) * config.d_latent
        save = 2 * config.d_latent - config.d_nope - config.d_value
        n_pairs = sum(s.n_new * (s.n_past + s.n_new / 2) for s in step.cache.segments)
        return save * n_pairs > make * sum(s.n_total for s in step.cache.segments)

    def _expanded(self, q_c: Tensor, q_r: Tensor, step: Step, layer_idx: int, segment: Segment) -> Tensor:
        """One sequence with keys and values of every head made for all its tokens: (T, H, V)."""
        rows, _ = step.cache.rows(layer_idx, "latent", segment)
        latent, k_r = rows.split([self.config.d_latent, self.config.d_rope], dim=-1)
        k_c = torch.einsum("sl,hnl->hsn", latent, self.k_up)
        k = torch.cat((k_c, k_r.expand(len(k_c), -1, -1)), dim=-1)  # (H, S, N + R)
        v = torch.einsum("sl,hvl->hsv", latent, self.v_up)
        return ops.attend(torch.cat((q_c, q_r), dim=-1), k, v, n_past=segment.n_past, scale=self.scale)

    def _choose(
        self,
        indexer: LightningIndexer,
        x: Tensor,
        squeezed: Tensor,
        cos: Tensor,
        sin: Tensor,
        step: Step,
        layer_idx: int,
    ) -> dict[str, list[Tensor | None]] | None:
        """For each sequence the tokens that each query sees; None when every query may see all of its past."""
        q, weights, k = indexer(x, squeezed, cos, sin)
        with step.timer("kv_cache"):
            step.cache.append(layer_idx, index=k)
        found: list[Tensor | None] = []
        for s in step.cache.segments:
            rows, _ = step.cache.rows(layer_idx, "index", s)
            top_k = indexer.config.top_k
            found.append(choose(q[s.rows], weights[s.rows], rows, n_past=s.n_past, rate=1, top_k=top_k))
        return None if all(numbers is None for numbers in found) else {"latent": found}
