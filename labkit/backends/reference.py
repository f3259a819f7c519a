"""The ``reference`` backend: the model's own forward in plain PyTorch, which every other backend equals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from labkit.backends.step import Backend, Counts, Rows, Step, as_hidden
from labkit.model.embedding import check_token_ids
from labkit.registry import register


class ReferenceStep:
    """The model's own forward. ``reason``: why it serves instead of the backend that was asked for."""

    computed_by = "reference"

    def __init__(self, transformer: Any, cache: Any, *, reason: str = "", keep_hidden: bool = False) -> None:
        self.transformer, self.cache, self.reason = transformer, cache, reason
        self.hidden: Tensor | None = None
        self._keep_hidden = keep_hidden

    def __call__(
        self,
        token_ids: Tensor,
        *,
        counts: Counts = None,
        rows: Rows = "last",
        timer: Any,
        should_stop: Callable[[], bool],
    ) -> Tensor:
        transformer = self.transformer
        check_token_ids(token_ids, transformer.config.vocab_size)
        x = transformer.run_layers(
            token_ids.to(transformer.device), self.cache, counts=counts, rows=rows, timer=timer, should_stop=should_stop
        )
        if self._keep_hidden:
            self.hidden = as_hidden(x)
        return transformer.predict(x, timer).float()

    def choose_next(
        self, token_id: int, *, more: bool, timer: Any, should_stop: Callable[[], bool]
    ) -> Callable[[], int] | None:
        return None


@register("backend", "reference", summary="Plain PyTorch, layer by layer: the textbook and the oracle")
class Reference(Backend):
    name = "reference"

    def bind(self, transformer: Any, cache: Any, *, keep_hidden: bool = False) -> Step:
        return ReferenceStep(transformer, cache, keep_hidden=keep_hidden)
