"""Attention with grouped keys and values: MHA, MQA and GQA, whole-context or sliding window."""

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
        with step.timer("kv_cache"):
            step.cache.append(layer_idx, k=k, v=v)
        out = step.cache.attend(layer_idx, q, scale=self.scale, softcap=config.softcap)
        return self.o_proj(out.flatten(1))
