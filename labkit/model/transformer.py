"""Token ids in, logits out: embedding, blocks of attention and FFN, final norm, head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from labkit.kvcache import KVCache, LayerEntries
from labkit.model.attention import build_attention, entries_of
from labkit.model.config import Layer, ModelConfig
from labkit.model.ffn import FeedForward
from labkit.model.norm import build_norm
from labkit.model.step import Step, _never
from labkit.perf.timer import NULL_TIMER


class Block(nn.Module):
    """One layer: what attention adds to the hidden states, then what the FFN adds."""

    def __init__(self, config: ModelConfig, layer: Layer) -> None:
        super().__init__()
        self.norms = layer.norms
        self.attention_norm = build_norm(config.d_model, config.norm)
        self.attention = build_attention(config.d_model, layer.attention, config.norm)
        self.ffn_norm = build_norm(config.d_model, config.norm)
        self.ffn = FeedForward(config.d_model, layer.ffn)

    def forward(self, x: Tensor, step: Step, layer_idx: int) -> Tensor:
        timer = step.timer
        with timer("norm"):
            normed = self.attention_norm(x)
        with timer("attention"):
            x = x + self.attention(normed, step, layer_idx)
        with timer("norm"):
            normed = self.ffn_norm(x)
        with timer("ffn"):
            return x + self.ffn(normed)


class Transformer(nn.Module):
    """The decoder-only language model that ``config`` describes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Block(config, layer) for layer in config.layers)
        self.final_norm = build_norm(config.d_model, config.norm)
        self.head = (
            None if config.tied_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=config.head_bias)
        )
        self.requires_grad_(False)

    @property
    def cache_entries(self) -> tuple[LayerEntries, ...]:
        """What each layer asks a cache to keep."""
        return tuple(entries_of(layer.attention) for layer in self.config.layers)

    def forward(
        self,
        token_ids: Tensor,
        cache: KVCache,
        *,
        counts: Any = None,
        last_only: bool = False,
        timer: Any = NULL_TIMER,
        should_stop: Callable[[], bool] = _never,
    ) -> Tensor:
        """Logits of the next token after each of ``token_ids`` (T,), a flat list: (T, V), in the model's dtype.

        ``counts`` {sequence id: tokens} says which sequence each run of tokens extends; None: all of sequence 0.
        ``last_only`` computes the head for each sequence's last token alone: (n_sequences, V).
        """
        with timer("embed"):
            step = Step(cache.begin(len(token_ids) if counts is None else counts), cache, timer, should_stop)
            x = self.embedding(token_ids)  # (T, M)
        for layer_idx, block in enumerate(self.layers):
            timer.layer = layer_idx
            step.check()
            x = block(x, step, layer_idx)
        timer.layer = -1
        if last_only:
            x = x[cache.last_rows()]
        cache.commit()
        with timer("norm"):
            x = self.final_norm(x)
        with timer("lm_head"):
            return self.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states (T, M), normed, to logits (T, V)."""
        return nn.functional.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of every parameter and buffer, each counted once."""
        tensors = {t.data_ptr() or id(t): t.nbytes for t in [*self.parameters(), *self.buffers()]}
        return sum(tensors.values())
