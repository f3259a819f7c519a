"""The feed-forward network: two thirds of a layer's weights."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from labkit.model.config import DenseFFN

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class FeedForward(nn.Module):
    """``down(act(gate(x)) * up(x))`` (SwiGLU, Shazeer, arXiv 2002.05202), or ``down(act(up(x)))``."""

    def __init__(self, d_model: int, config: DenseFFN) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.gate_proj = nn.Linear(d_model, config.d_ff, bias=config.bias) if config.gated else None
        self.up_proj = nn.Linear(d_model, config.d_ff, bias=config.bias)
        self.down_proj = nn.Linear(config.d_ff, d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
