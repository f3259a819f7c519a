"""The feed-forward network: what a token does by itself, and two thirds of a dense layer's weights.

    two-layer   W_down act(W_up x)                       GPT-2
    gated       W_down (act(W_gate x) * (W_up x))        SwiGLU, GeGLU (Shazeer, arXiv 2002.05202)
                gate and up cut off at +-limit           DeepSeek-V4

x is (T, M), the hidden width d_ff. The mixture of experts stands in ``moe``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from labkit.model.config import DenseFFN

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class FeedForward(nn.Module):
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` when not gated: (T, M) -> (T, M)."""

    def __init__(self, d_model: int, config: DenseFFN) -> None:
        super().__init__()
        self.activation, self.limit = ACTIVATIONS[config.activation], config.limit
        self.why_not_compiled = None if config.limit is None else "an FFN with a limit is not compiled."
        self.gate_proj = nn.Linear(d_model, config.d_ff, bias=config.bias) if config.gated else None
        self.up_proj = nn.Linear(d_model, config.d_ff, bias=config.bias)
        self.down_proj = nn.Linear(config.d_ff, d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))
        gate, up = cut(self.gate_proj(x), self.up_proj(x), self.limit)
        return self.down_proj(self.activation(gate) * up)


def cut(gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """Gate and up within the limit, where there is one."""
    return (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))
