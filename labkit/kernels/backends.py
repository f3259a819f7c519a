"""Backends: who computes a step. Each is a registry entry whose ``build`` returns a step function.

    build(config, transformer=..., cache=...) -> step(token_ids, *, timer, should_stop) -> logits (n_sequences, V)

``reference`` is the model's own forward in plain PyTorch; every other backend equals it. A backend that cannot
serve a model or a cache hands the work to the reference and says why: ``step.reason``, and ``reason_for`` before
anything is built.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.kernels.cpu import fused
from labkit.registry import register

StepFunction = Callable[..., Tensor]


class ReferenceStep:
    """The model's own forward. ``reason``: why it serves instead of the backend that was asked for; "" when it was."""

    computed_by = "reference"

    def __init__(self, transformer: Any, cache: Any, reason: str = "") -> None:
        self.transformer, self.cache, self.reason = transformer, cache, reason

    def __call__(self, token_ids: Tensor, *, timer: Any, should_stop: Callable[[], bool]) -> Tensor:
        return self.transformer(token_ids, self.cache, last_only=True, timer=timer, should_stop=should_stop)


@register("backend", "reference", summary="Plain PyTorch, layer by layer: the textbook and the oracle")
def reference(config: None, *, transformer: Any, cache: Any) -> StepFunction:
    return ReferenceStep(transformer, cache)


class WaitingStep:
    """The reference until the compiled step is ready, which is then built and takes over between two steps."""

    def __init__(self, transformer: Any, cache: Any, build: Callable[[], StepFunction]) -> None:
        self._reference = ReferenceStep(transformer, cache, "the compiled step is being compiled")
        self._build = build
        self._step: StepFunction | None = None

    @property
    def computed_by(self) -> str:
        return "fused" if self._step is not None else "reference"

    @property
    def reason(self) -> str:
        return "" if self._step is not None else self._reference.reason

    def __call__(self, token_ids: Tensor, *, timer: Any, should_stop: Callable[[], bool]) -> Tensor:
        if self._step is None:
            compiled = fused.compilation()
            if compiled.ready():
                with timer("schedule"):
                    self._step = self._build()
            elif compiled.state == "failed":
                self._reference.reason = f"compiling failed: {compiled.reason}"
        return (self._step or self._reference)(token_ids, timer=timer, should_stop=should_stop)


@register("backend", "fused", summary="A whole decode step in one compiled function, on packed or plain weights")
def build_fused(config: None, *, transformer: Any, cache: Any) -> StepFunction:
    reason = reason_for("fused", transformer=transformer, cache=cache)
    if reason:
        return ReferenceStep(transformer, cache, reason)
    build = partial(fused.FusedStep, transformer, cache, torch.get_num_threads())
    return build() if fused.compilation().ready() else WaitingStep(transformer, cache, build)


def reason_for(name: str, *, transformer: Any, cache: Any) -> str | None:
    """Why the backend ``name`` hands this model on this cache to the reference; None when it does not."""
    if name != "fused":
        return None
    return fused.why_not(transformer) or fused.why_not_cache(cache)


def choose(choice: Any, *, transformer: Any, cache: Any) -> Any:
    """The backend that ``"auto"`` means for this model and cache; any other choice is returned as it is."""
    if choice != "auto":
        return choice
    return "reference" if reason_for("fused", transformer=transformer, cache=cache) else "fused"


def prepare(name: str = "fused", *, timeout_s: float | None = None) -> bool:
    """Wait until the backend ``name`` is compiled (None: as long as it takes); whether it is. For benchmarks."""
    return fused.compilation().ready(timeout_s) if name == "fused" else True


def status() -> str:
    """One line for the reader: whether the compiled step is ready, and what serves meanwhile."""
    return fused.compilation().describe()
