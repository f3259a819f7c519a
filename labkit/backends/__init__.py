"""Backends: who computes a step. They stand above the model and the caches, which they take apart.

Each is one object in the registry (``step.Backend``): why not for this model and cache, prepare, bind. What it gives is
a ``step.Step``. ``reference`` is the model's own forward in plain PyTorch; every other backend equals it. A backend
that cannot serve a model or a cache hands the work to the reference, and the step's ``reason`` says why.
"""

# ruff: noqa: I001
from __future__ import annotations

from typing import Any

import torch

from labkit import registry
from labkit.backends import reference, fused, cuda_graph, compiled  # noqa: F401 - offered in the order of these names
from labkit.backends.lookup import Given
from labkit.backends.reference import ReferenceStep
from labkit.backends.step import Backend, Step
from labkit.kernels.cpu.compilation import compilation


__all__ = [
    "Backend",
    "Given",
    "ReferenceStep",
    "Step",
    "bind",
    "bind_given",
    "choose",
    "find",
    "prepare",
    "start",
    "status",
    "warm_up",
    "why_not",
]

BY_DEVICE = {"cpu": "fused", "cuda": "cuda-graph"}
"""What "auto" tries, by the model's device; elsewhere the reference."""


def find(choice: Any, device: torch.device | None = None) -> Backend:
    """The backend that a name means; "auto" is what is tried first for models on ``device``.

    Raises ValueError that lists the choices for an unknown name, and that says why for one that this machine lacks."""
    if choice == "auto":
        name = BY_DEVICE.get(device.type if device is not None else "cpu", "reference")
        offered = {info.name for info in registry.components("backend") if info.unavailable is None}
        choice = name if name in offered else "reference"
    component, config = registry.find("backend", choice)
    return component.build(config)


def bind(choice: Any, *, transformer: Any, cache: Any, keep_hidden: bool = False) -> tuple[str, Step]:
    """The name of the backend that ``choice`` (a name or "auto") means, and its step for this model and cache.

    ``keep_hidden``: the step keeps the hidden states of its last call's rows (``Step.hidden``)."""
    backend = find(choice, transformer.device)
    reason = backend.why_not(transformer, cache)
    if reason is None:
        return backend.name, backend.bind(transformer, cache, keep_hidden=keep_hidden)
    if choice == "auto":  # nothing else was asked for: there is nothing to excuse
        return "reference", ReferenceStep(transformer, cache, keep_hidden=keep_hidden)
    return backend.name, ReferenceStep(transformer, cache, reason=reason, keep_hidden=keep_hidden)


def bind_given(choice: Any, *, transformer: Any, cache: Any, given: Given) -> Step | None:
    """The step of a model that is ``given`` its inputs, with its hidden states, where the backend has one; None where
    such a model is left to plain PyTorch."""
    return find(choice, transformer.device).bind_given(transformer, cache, given)


def why_not(choice: Any, *, transformer: Any, cache: Any) -> str | None:
    """Why the backend ``choice`` hands this model on this cache to the reference; None when it does not."""
    return find(choice, transformer.device).why_not(transformer, cache)


def choose(choice: Any, *, transformer: Any, cache: Any) -> str:
    """The name of the backend that will compute, the reference where ``choice`` cannot."""
    backend = find(choice, transformer.device)
    return "reference" if backend.why_not(transformer, cache) else backend.name


def start(choice: Any, device: torch.device) -> None:
    """Begin, in the background, what the choice will need for models on ``device``: while one is being read."""
    if device.type == "cpu":
        find(choice, device).prepare()


def warm_up(choice: Any, transformer: Any) -> None:
    """Find out about a model what its first run would have to, where that can be done by now."""
    find(choice, transformer.device).warm_up(transformer)


def prepare(choice: Any = "fused", *, timeout_s: float | None = None) -> bool:
    """Wait until a backend can compute at its full speed (None: as long as it takes); whether it can."""
    return find(choice).prepare(timeout_s)


def status() -> str:
    """One line for the reader: whether the compiled step is ready, and what serves meanwhile."""
    return compilation().describe()
