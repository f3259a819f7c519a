"""A loaded model: the transformer, its tokenizer, and where both came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit import registry
from labkit.kvcache import KVCache
from labkit.kvcache.none import NoCache
from labkit.model.config import ModelConfig, dtype_name
from labkit.model.embedding import check_token_ids
from labkit.model.transformer import Transformer


class Model:
    """What ``labkit.load()`` returns. Call it with token ids to get logits."""

    def __init__(
        self,
        transformer: Transformer,
        tokenizer: Any,
        *,
        name: str,
        weights: Any = None,
        backend: Any = "auto",
        source: str = "",
    ) -> None:
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.name = name
        self.weights = weights
        """How the linear layers' weights are held: None as ``dtype``; a format's name; its config where it is not the
        default of that name."""
        self.backend = backend
        self.source = source

    @property
    def config(self) -> ModelConfig:
        return self.transformer.config

    @property
    def device(self) -> torch.device:
        return self.transformer.device

    @property
    def dtype(self) -> torch.dtype:
        return self.transformer.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in memory, a tied head counted once."""
        return self.transformer.nbytes

    @torch.inference_mode()
    def __call__(self, token_ids: Sequence[int] | Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits of the next token after each token, float32 (T, V).

        With a ``cache`` the tokens continue sequence 0. Raises ValueError for an empty list, an id outside the
        vocabulary, or more tokens than the context holds."""
        ids = torch.as_tensor(token_ids, dtype=torch.int64, device=self.device)
        check_prompt(ids, self.config)
        if cache is None:
            cache = NoCache(
                self.transformer.cache_entries, capacity_tokens=len(ids), device=self.device, dtype=self.dtype
            )
        if cache.n_tokens() + len(ids) > self.config.context_tokens:
            raise ValueError(
                f"{cache.n_tokens() + len(ids)} tokens exceed the model's context of {self.config.context_tokens}."
            )
        return self.transformer(ids, cache).float()

    def __repr__(self) -> str:
        held = registry.label("weights", self.weights) if self.weights else dtype_name(self.dtype)
        return f"Model({self.name!r}, {held}, {self.device}, {self.nbytes / 1e6:.0f} MB)"


def check_prompt(ids: Tensor, config: ModelConfig) -> None:
    """Raise ValueError unless ``ids`` is a non-empty flat list of ids that the vocabulary has."""
    if ids.ndim != 1 or not len(ids):
        raise ValueError(f"token_ids must be a flat, non-empty list; got shape {tuple(ids.shape)}.")
    check_token_ids(ids, config.vocab_size)
