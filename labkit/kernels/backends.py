"""Backends: who computes a step. Each is a registry entry whose ``build`` returns a step function.

    build(config, transformer=..., cache=...) -> step(token_ids, *, timer, should_stop) -> logits (n_sequences, V)

``reference`` is the model's own forward in plain PyTorch; every other backend equals it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from labkit.registry import register

StepFunction = Callable[..., Tensor]


@register("backend", "reference", summary="Plain PyTorch, layer by layer: the textbook and the oracle")
def reference(config: None, *, transformer: Any, cache: Any) -> StepFunction:
    def step(token_ids: Tensor, *, timer: Any, should_stop: Callable[[], bool]) -> Tensor:
        return transformer(token_ids, cache, last_only=True, timer=timer, should_stop=should_stop)

    return step


def choose(choice: Any, *, transformer: Any, cache: Any) -> Any:
    """The backend that ``"auto"`` means for this model and cache; any other choice is returned as it is."""
    return "reference" if choice == "auto" else choice
