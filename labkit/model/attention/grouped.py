"""Attention with grouped keys and values: MHA, MQA and GQA, whole context or sliding window.

    q, k, v = W_q x, W_k x, W_v x                         (T, H, D), (T, G, D), (T, G, D)
    q, k    = rope(norm(q)), rope(norm(k))                norm only with QK-norm
    out     = W_o [ softmax(scale q_h . k_g) v_g  for each head h, its group g = h // (H/G) ]

Multi-head attention (Vaswani et al., arXiv 1706.03762) has a key and a value head for each query head; multi-query
(Shazeer, arXiv 1911.02150) has one for all; grouped-query (Ainslie et al., arXiv 2305.13245) stands between. The
scores cost the same whatever G is. What falls is the memory: 2 G D values a token and layer.

Who sees whom (causal, window, sinks) is told to the cache once, as ``entries``; how it is stored is the cache's.
"""

from __future__ import annotations

from torch import Tensor, nn

from labkit.kernels import ops
from labkit.kvcache import Entry, LayerEntries
from labkit.model.config import GroupedAttention, Norm
from labkit.model.norm import build_norm
from labkit.model.step import Step


class Attention(nn.Module):
    """``o_proj(softmax(scale rope(q) rope(k)^T) v)``; H/G query heads share one key and value head."""

    def __init__(self, d_model: int, config: GroupedAttention, norm: Norm) -> None:
        super().__init__()
        self.config = config
        d_q, d_kv = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
        self.q_proj = nn.Linear(d_model, d_q, bias=config.qkv_bias)
        self.k_proj = nn.Linear(d_model, d_kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(d_model, d_kv, bias=config.qkv_bias)
        self.o_proj = nn.Linear(d_q, d_model, bias=config.out_bias)
        if config.qk_norm is not None:
            per_head = config.qk_norm == "head"
            self.q_norm = build_norm(config.d_head if per_head else d_q, norm)
            self.k_norm = build_norm(config.d_head if per_head else d_kv, norm)
        self.scale = config.scale if config.scale is not None else config.d_head**-0.5

    @staticmethod
    def entries(config: GroupedAttention) -> LayerEntries:
        """What a cache must keep for this layer: one K and one V row a token."""
        shape = (config.n_kv_heads, config.d_head)
        return LayerEntries((Entry("k", shape), Entry("v", shape)), config.window, config.n_sinks)

    def forward(self, x: Tensor, step: Step, layer_idx: int) -> Tensor:
        q, k, v = self.project(x, step)
        with step.timer("kv_cache"):
            step.cache.append(layer_idx, k=k, v=v)
        if step.watch is not None:
            step.watch.attention(layer_idx, q, step.cache, scale=self.scale, softcap=self.config.softcap)
        out = step.cache.attend(layer_idx, q, scale=self.scale, softcap=self.config.softcap)
        return self.o_proj(out.flatten(1))

    def project(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """x (T, M) to q (T, H, D), k and v (T, G, D), normed and turned: what is stored and what asks."""
        config = self.config
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if config.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.unflatten(-1, (config.n_heads, config.d_head))  # (T, H, D)
        k = k.unflatten(-1, (config.n_kv_heads, config.d_head))  # (T, G, D)
        v = v.unflatten(-1, (config.n_kv_heads, config.d_head))
        if config.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if config.rope is not None:
            cos, sin = step.angles(config.rope, config.d_head, x.dtype)
            q = ops.rotate(q, cos, sin, layout=config.rope.layout)
            k = ops.rotate(k, cos, sin, layout=config.rope.layout)
        return q, k, v
