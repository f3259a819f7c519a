"""Backends: who computes a step. Each is a registry entry whose ``build`` returns a step function.

    build(config, transformer=..., cache=...)
        -> step(token_ids, *, counts=None, timer, should_stop) -> logits (n_sequences, V)

``counts`` {sequence id: tokens} says which sequence each run of ``token_ids`` extends; None: all of sequence 0.

``reference`` is the model's own forward in plain PyTorch; every other backend equals it. A backend that cannot
serve a model or a cache hands the work to the reference and says why: ``step.reason``, and ``reason_for`` before
anything is built.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit import registry
from labkit.kernels import compiled
from labkit.kernels.cpu import fused
from labkit.kernels.cpu.compilation import compilation
from labkit.registry import register

StepFunction = Callable[..., Tensor]


class ReferenceStep:
    """The model's own forward. ``reason``: why it serves instead of the backend that was asked for; "" when it was."""

    computed_by = "reference"

    def __init__(self, transformer: Any, cache: Any, reason: str = "") -> None:
        self.transformer, self.cache, self.reason = transformer, cache, reason

    def __call__(self, token_ids: Tensor, *, counts: Any = None, timer: Any, should_stop: Callable[[], bool]) -> Tensor:
        return self.transformer(
            token_ids, self.cache, counts=counts, last_only=True, timer=timer, should_stop=should_stop
        )


@register("backend", "reference", summary="Plain PyTorch, layer by layer: the textbook and the oracle")
def reference(config: None, *, transformer: Any, cache: Any) -> StepFunction:
    return ReferenceStep(transformer, cache)


class WaitingStep:
    """The reference until the compiled step is ready, which is then built and takes over between two steps."""

    def __init__(self, transformer: Any, cache: Any, build: Callable[[], StepFunction]) -> None:
        self._reference = ReferenceStep(transformer, cache, "the compiled step is being compiled")
        self._build = build
        self._step: StepFunction | None = None
        self._n_waited = 0

    @property
    def computed_by(self) -> str:
        return "fused" if self._step is not None else "reference"

    @property
    def reason(self) -> str:
        if self._step is None:
            return self._reference.reason
        first = "the first step was" if self._n_waited == 1 else f"the first {self._n_waited} steps were"
        note = f"{first} plain PyTorch, while the compiled step was being compiled"
        return "; ".join(filter(None, (note, getattr(self._step, "reason", ""))))

    def __call__(self, token_ids: Tensor, *, counts: Any = None, timer: Any, should_stop: Callable[[], bool]) -> Tensor:
        step = self._serving(timer)
        return step(token_ids, counts=counts, timer=timer, should_stop=should_stop)

    def choose_next(
        self, token_id: int, *, more: bool, timer: Any, should_stop: Callable[[], bool]
    ) -> Callable[[], int]:
        """As ``FusedStep.choose_next``."""
        step = self._serving(timer)
        if isinstance(step, fused.FusedStep):
            return step.choose_next(token_id, more=more, timer=timer, should_stop=should_stop)
        logits = step(torch.tensor([token_id]), timer=timer, should_stop=should_stop)[0]
        return lambda: int(logits.argmax()) if logits.max().isfinite() else -1

    def _serving(self, timer: Any) -> Any:
        """Who serves the next step."""
        if self._step is None:
            compiled = compilation()
            if compiled.ready():
                with timer("schedule"):
                    self._step = self._build()
            elif compiled.state == "failed":
                self._reference.reason = f"compiling failed: {compiled.reason}"
        self._n_waited += self._step is None
        return self._step or self._reference


@register("backend", "fused", summary="A whole decode step in one compiled function, on packed or plain weights")
def build_fused(config: None, *, transformer: Any, cache: Any) -> StepFunction:
    made, reason = fused.find(transformer, cache)
    if reason:
        return ReferenceStep(transformer, cache, reason)
    build = partial(fused.FusedStep, transformer, cache, torch.get_num_threads(), made)
    return build() if compilation().ready() else WaitingStep(transformer, cache, build)


def _no_cuda_graph() -> str | None:
    if not torch.cuda.is_available():
        return "it needs an NVIDIA GPU and a CUDA build of torch."
    if importlib.util.find_spec("triton") is None:
        return "it needs Triton: pip install triton (Linux)."
    return None


@register(
    "backend",
    "cuda-graph",
    summary="Triton kernels, a decode step replayed as one launch",
    why_not=_no_cuda_graph,
)
def build_cuda_graph(config: None, *, transformer: Any, cache: Any) -> StepFunction:
    reason = reason_for("cuda-graph", transformer=transformer, cache=cache)
    if reason:
        return ReferenceStep(transformer, cache, reason)
    from labkit.kernels.triton.step import GraphStep

    return GraphStep(transformer, cache)


@register(
    "backend",
    "compiled",
    summary="torch.compile on a layer's pieces: single tokens, plain weights, half a minute to compile",
    why_not=compiled.why_not,
)
def build_compiled(config: None, *, transformer: Any, cache: Any) -> StepFunction:
    if reason := compiled.reason_for(transformer):
        return ReferenceStep(transformer, cache, reason)
    return compiled.CompiledStep(transformer, cache)


def reason_for(name: str, *, transformer: Any, cache: Any) -> str | None:
    """Why the backend ``name`` hands this model on this cache to the reference; None when it does not."""
    if name == "cuda-graph":
        if transformer.device.type != "cuda":
            return f"the model is on {transformer.device}: the captured step is for a GPU."
        from labkit.kernels.triton.step import why_not

        return why_not(transformer, cache)
    if name == "compiled":
        return compiled.reason_for(transformer)
    if name != "fused":
        return None
    return fused.find(transformer, cache)[1]


def bind(choice: Any, *, transformer: Any, cache: Any) -> tuple[str, StepFunction]:
    """The name of the backend that ``choice`` (a name, a config, or "auto") means, and its step for this cache."""
    backend, config = registry.find("backend", _default(transformer) if choice == "auto" else choice)
    step = backend.build(config, transformer=transformer, cache=cache)
    if choice == "auto" and isinstance(step, ReferenceStep):
        return "reference", ReferenceStep(transformer, cache)  # nothing else was asked for: there is nothing to excuse
    return backend.name, step


def _default(transformer: Any) -> str:
    """What "auto" tries."""
    return "cuda-graph" if transformer.device.type == "cuda" and _no_cuda_graph() is None else "fused"


def choose(choice: Any, *, transformer: Any, cache: Any) -> Any:
    """The backend that ``"auto"`` means for this model and cache; any other choice is returned as it is."""
    if choice != "auto":
        return choice
    name = _default(transformer)
    return "reference" if reason_for(name, transformer=transformer, cache=cache) else name


def start(choice: Any, device: torch.device) -> None:
    """Begin to compile, in the background, what the choice will need there: while a model is being read."""
    if choice in ("auto", "fused") and device.type == "cpu":
        compilation().start()


def settle(choice: Any, transformer: Any) -> None:
    """Find out about a model what its first run would have to, where the compiled step is ready by now."""
    if choice in ("auto", "fused") and transformer.device.type == "cpu" and compilation().state == "ready":
        fused.settle(transformer, torch.get_num_threads())


def prepare(name: str = "fused", *, timeout_s: float | None = None) -> bool:
    """Wait until the backend ``name`` is compiled (None: as long as it takes); whether it is. For benchmarks."""
    return compilation().ready(timeout_s) if name == "fused" else True


def rouse(name: str) -> None:
    """Wake the threads of the backend ``name``, as they are within a run: before a step that is timed alone."""
    if name == "fused" and compilation().state == "ready":
        from labkit.kernels.cpu.team import team

        team(torch.get_num_threads()).rouse()


def status() -> str:
    """One line for the reader: whether the compiled step is ready, and what serves meanwhile."""
    return compilation().describe()
