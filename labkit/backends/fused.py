"""The ``fused`` backend: a whole step in one compiled function, on the CPU.

Compiling takes about a minute the first time on a machine and is kept on disk; it happens in the background, and the
reference serves until it is done.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.backends import fused_step
from labkit.backends.lookup import Given
from labkit.backends.reference import ReferenceStep
from labkit.backends.step import Backend, Counts, Rows, Step
from labkit.backends.storage import NUMBERS
from labkit.backends.unpacked import forget, unpacked
from labkit.kernels.cpu import plan
from labkit.kernels.cpu.compilation import compilation
from labkit.kernels.cpu.team import team
from labkit.model.config import dtype_name
from labkit.registry import register


class WaitingStep:
    """The reference until the compiled step is ready, which is then built and takes over between two steps."""

    def __init__(self, transformer: Any, cache: Any, build: Callable[[], Step], *, keep_hidden: bool = False) -> None:
        self._transformer = transformer
        self._reference = ReferenceStep(
            unpacked(transformer), cache, reason="the compiled step is being compiled", keep_hidden=keep_hidden
        )
        self._build = build
        self._step: Step | None = None
        self._n_waited = 0

    @property
    def computed_by(self) -> str:
        return self._reference.computed_by if self._step is None else self._step.computed_by

    @property
    def hidden(self) -> Tensor | None:
        return self._reference.hidden if self._step is None else self._step.hidden

    @property
    def reason(self) -> str:
        if self._step is None:
            return self._reference.reason
        first = "the first step was" if self._n_waited == 1 else f"the first {self._n_waited} steps were"
        note = f"{first} plain PyTorch, while the compiled step was being compiled"
        return "; ".join(filter(None, (note, self._step.reason)))

    def __call__(
        self,
        token_ids: Tensor,
        *,
        counts: Counts = None,
        rows: Rows = "last",
        timer: Any,
        should_stop: Callable[[], bool],
    ) -> Tensor:
        self._look(timer)
        self._n_waited += self._step is None
        step = self._step or self._reference
        return step(token_ids, counts=counts, rows=rows, timer=timer, should_stop=should_stop)

    def choose_next(
        self, token_id: int, *, more: bool, timer: Any, should_stop: Callable[[], bool]
    ) -> Callable[[], int] | None:
        self._look(timer)
        step = self._step or self._reference
        return step.choose_next(token_id, more=more, timer=timer, should_stop=should_stop)

    def _look(self, timer: Any) -> None:
        """Build the compiled step when it can be had."""
        if self._step is not None:
            return
        compiled = compilation()
        if compiled.ready():
            with timer("schedule"):
                self._step = self._build()
                self._reference.transformer = self._transformer
                forget(self._transformer)
        elif compiled.state == "failed":
            self._reference.reason = f"compiling failed: {compiled.reason}"


@register("backend", "fused", summary="A whole step in one compiled function, on packed or plain weights")
class Fused(Backend):
    name = "fused"

    def why_not(self, transformer: Any, cache: Any) -> str | None:
        return fused_step.find(transformer, cache)[1]

    def why_unpack(self, config: Any, *, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu":
            return f"there is no product of them on {device.type}"
        if dtype not in NUMBERS:
            return f"the compiled step does not compute in {dtype_name(dtype)}"
        if any(layer.attention.kernels != "grouped" for layer in config.layers):
            return "the compiled step does not know this attention"
        return "the compiled step is not available here" if compilation().state == "failed" else None

    def prepare(self, timeout_s: float | None = 0.0) -> bool:
        return compilation().ready(timeout_s)

    def warm_up(self, transformer: Any) -> None:
        if transformer.device.type == "cpu" and compilation().state == "ready":
            plan.find(transformer)
            team(torch.get_num_threads())

    def wake(self) -> None:
        if compilation().state == "ready":
            team(torch.get_num_threads()).rouse()

    def bind_given(self, transformer: Any, cache: Any, given: Given) -> Step | None:
        made, reason = fused_step.find(transformer, cache)
        if reason or not compilation().ready():
            return None
        n_threads = torch.get_num_threads()
        return fused_step.FusedStep(transformer, cache, n_threads, made, keep_hidden=True, given=given)

    def bind(self, transformer: Any, cache: Any, *, keep_hidden: bool = False) -> Step:
        made, _ = fused_step.find(transformer, cache)
        build = partial(
            fused_step.FusedStep, transformer, cache, torch.get_num_threads(), made, keep_hidden=keep_hidden
        )
        if compilation().ready():
            return build()
        return WaitingStep(transformer, cache, build, keep_hidden=keep_hidden)
