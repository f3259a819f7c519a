"""One layer: what attention adds to the hidden states, then what the FFN adds.

The hidden states x (T, M) run through all layers like a river; a sub-layer reads them, and adds what it found.
Where the norms stand is the family's choice (``Layer.norms``), and each layout is one function below.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from labkit.model.attention import build_attention
from labkit.model.config import DenseFFN, Layer, ModelConfig, MoEFFN
from labkit.model.ffn import FeedForward
from labkit.model.moe import MixtureOfExperts
from labkit.model.norm import build_norm
from labkit.model.step import Step
from labkit.model.streams import Mix

FFN_KINDS: dict[type, Any] = {DenseFFN: FeedForward, MoEFFN: MixtureOfExperts}


class Block(nn.Module):
    """``forward`` is the layout's function: (T, M) -> (T, M)."""

    def __init__(self, config: ModelConfig, layer: Layer) -> None:
        super().__init__()
        self.norms = layer.norms
        self.attention_norm = build_norm(config.d_model, config.norm)
        self.attention = build_attention(config.d_model, layer.attention, config.norm)
        self.ffn_norm = build_norm(config.d_model, config.norm)
        self.ffn = FFN_KINDS[type(layer.ffn)](config.d_model, layer.ffn)
        if layer.norms == "sandwich":
            self.attention_post_norm = build_norm(config.d_model, config.norm)
            self.ffn_post_norm = build_norm(config.d_model, config.norm)
        if layer.norms == "streams":
            if config.streams is None:
                raise ValueError("a layer of streams, but the config has none: give ModelConfig streams=Streams(4).")
            self.attention_mix = Mix(config.d_model, config.streams, config.norm)
            self.ffn_mix = Mix(config.d_model, config.streams, config.norm)

    def forward(self, x: Tensor, step: Step, layer_idx: int) -> Tensor:
        return LAYOUTS[self.norms](self, x, step, layer_idx)


def pre(block: Block, x: Tensor, step: Step, layer_idx: int) -> Tensor:
    """x + f(norm(x)): the river itself is never normed (GPT-2, Llama, Qwen, Mistral, Phi-3)."""
    timer = step.timer
    with timer("norm"):
        normed = block.attention_norm(x)
    with timer("attention"):
        x = x + block.attention(normed, step, layer_idx)
    with timer("norm"):
        normed = block.ffn_norm(x)
    with timer("ffn"):
        return x + block.ffn(normed)


def post(block: Block, x: Tensor, step: Step, layer_idx: int) -> Tensor:
    """x + norm(f(x)): each addition has the norm's size, whatever f made of it (OLMo-2, arXiv 2501.00656)."""
    timer = step.timer
    with timer("attention"):
        added = block.attention(x, step, layer_idx)
    with timer("norm"):
        x = x + block.attention_norm(added)
    with timer("ffn"):
        added = block.ffn(x)
    with timer("norm"):
        return x + block.ffn_norm(added)


def sandwich(block: Block, x: Tensor, step: Step, layer_idx: int) -> Tensor:
    """x + norm(f(norm(x))): both (Gemma 2, arXiv 2408.00118, and Gemma 3)."""
    timer = step.timer
    with timer("norm"):
        normed = block.attention_norm(x)
    with timer("attention"):
        added = block.attention(normed, step, layer_idx)
    with timer("norm"):
        x = x + block.attention_post_norm(added)
        normed = block.ffn_norm(x)
    with timer("ffn"):
        added = block.ffn(normed)
    with timer("norm"):
        return x + block.ffn_post_norm(added)


def streams(block: Block, x: Tensor, step: Step, layer_idx: int) -> Tensor:
    """Here x is N streams (T, N, M); each sub-layer reads one mixture of them, and they mix beside it (V4)."""
    timer = step.timer
    with timer("norm"):
        read, mixed, shares = block.attention_mix(x)
        normed = block.attention_norm(read)
    with timer("attention"):
        x = mixed + shares * block.attention(normed, step, layer_idx)[:, None]
    with timer("norm"):
        read, mixed, shares = block.ffn_mix(x)
        normed = block.ffn_norm(read)
    with timer("ffn"):
        named = isinstance(block.ffn, MixtureOfExperts) and block.ffn.config.n_ids
        out = block.ffn(normed, step.token_ids) if named else block.ffn(normed)
        return mixed + shares * out[:, None]


LAYOUTS = {"pre": pre, "post": post, "sandwich": sandwich, "streams": streams}
