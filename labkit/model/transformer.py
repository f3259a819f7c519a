"""Token ids in, logits out: embedding, blocks of attention and FFN, final norm, head.

    x = embed(ids)                                    (T, M)
    for each layer:   x = x + attention(norm(x))      what a token gathers from those before it
                      x = x + ffn(norm(x))            what it makes of it by itself
    logits = head(norm(x))                            (T, V)

Every family runs through this file. What differs between them (rotary or learned positions, where the norms
stand, who shares keys, which layers see far, how many experts) is the config's data, read once when the model is
built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from labkit.kvcache import KVCache, LayerEntries
from labkit.model.attention import entries_of
from labkit.model.block import Block
from labkit.model.config import ModelConfig
from labkit.model.embedding import build_positions, embed
from labkit.model.norm import build_norm
from labkit.model.step import Step, _never
from labkit.model.streams import Confluence
from labkit.perf.timer import NULL_TIMER


class Transformer(nn.Module):
    """The decoder-only language model that ``config`` describes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = build_positions(config)
        self.layers = nn.ModuleList(Block(config, layer) for layer in config.layers)
        self.confluence = None if config.streams is None else Confluence(config.d_model, config.streams, config.norm)
        self.final_norm = build_norm(config.d_model, config.norm)
        self.head = (
            None if config.tied_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=config.head_bias)
        )
        self.cache_entries: tuple[LayerEntries, ...] = tuple(entries_of(layer.attention) for layer in config.layers)
        """What each layer asks a cache to keep."""
        self._frequencies: dict[Any, Tensor] = {}
        self.requires_grad_(False)

    def forward(
        self,
        token_ids: Tensor,
        cache: KVCache,
        *,
        counts: Any = None,
        rows: Literal["last", "all"] = "all",
        timer: Any = NULL_TIMER,
        should_stop: Callable[[], bool] = _never,
        watch: Any = None,
    ) -> Tensor:
        """Logits of the next token after each of ``token_ids`` (T,), a flat list: (T, V), in the model's dtype.

        ``counts`` {sequence id: tokens} says which sequence each run of tokens extends; None: all of sequence 0.
        ``rows="last"`` computes the head for each sequence's last token alone: (n_sequences, V). ``watch`` is shown
        the named activations (``labkit.model.watch``). Raises ValueError when a sequence outgrows the context.
        """
        options = {"counts": counts, "rows": rows, "timer": timer, "should_stop": should_stop, "watch": watch}
        return self.predict(self.run_layers(token_ids, cache, **options), timer)

    def run_layers(
        self,
        token_ids: Tensor,
        cache: KVCache,
        *,
        counts: Any = None,
        rows: Literal["last", "all"] = "all",
        timer: Any = NULL_TIMER,
        should_stop: Callable[[], bool] = _never,
        watch: Any = None,
    ) -> Tensor:
        """The hidden states after the last block, before the final norm, of the rows that are asked for: (T, M) or
        (n_sequences, M). The tokens are then part of the cache's history."""
        with timer("embed"):
            step = self.open(cache, len(token_ids) if counts is None else counts, timer, should_stop, watch)
            x = self.embed(token_ids, step)
        if watch is not None:
            watch.hidden(-1, self.join(x))
        for layer_idx, block in enumerate(self.layers):
            timer.layer = layer_idx
            step.check()
            x = block(x, step, layer_idx)
            if watch is not None:
                watch.hidden(layer_idx, self.join(x))
        timer.layer = -1
        if rows == "last":
            x = x[cache.last_rows()]
        x = self.join(x)
        cache.commit()
        return x

    def join(self, x: Tensor) -> Tensor:
        """What the final norm reads: x (T, M) itself, or a mixture of its streams (T, N, M)."""
        return x if self.confluence is None else self.confluence(x)

    def predict(self, x: Tensor, timer: Any = NULL_TIMER) -> Tensor:
        """Hidden states (T, M) after the last block to logits (T, V)."""
        with timer("norm"):
            x = self.final_norm(x)
        with timer("lm_head"):
            return self.logits(x)

    def open(
        self,
        cache: KVCache,
        counts: Any,
        timer: Any = NULL_TIMER,
        should_stop: Callable[[], bool] = _never,
        watch: Any = None,
    ) -> Step:
        """Open a step of ``counts`` new tokens in ``cache``. Raises ValueError when one outgrows the context."""
        cache.open(counts)
        context = self.config.context_tokens
        for segment in cache.segments:
            if segment.n_total > context:
                raise ValueError(
                    f"sequence {segment.sequence_id} would hold {segment.n_total} tokens; this model's context is "
                    f"{context}: shorten the prompt, or generate fewer tokens."
                )
        return Step(cache, timer, should_stop, watch, self._frequencies)

    def embed(self, token_ids: Tensor, step: Step) -> Tensor:
        """What the layers see of ``token_ids`` (T,), the tokens of an open step: (T, M), or N copies of it."""
        step.token_ids, scale = token_ids, self.config.embedding_scale
        x = embed(token_ids, step.positions, table=self.embedding, position_table=self.positions, scale=scale)
        return x if self.config.streams is None else x[:, None].repeat(1, self.config.streams.n_streams, 1)

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states (T, M), normed, to logits (T, V)."""
        logits = nn.functional.linear(x, self.embedding.weight) if self.head is None else self.head(x)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

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
