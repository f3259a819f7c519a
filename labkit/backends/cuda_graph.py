"""The ``cuda-graph`` backend: Triton kernels, a decode step replayed as one launch."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from labkit.backends.step import Backend, Step
from labkit.registry import register


def why_not() -> str | None:
    """Why this machine has no such step; None when it has."""
    if not torch.cuda.is_available():
        return "it needs an NVIDIA GPU and a CUDA build of torch."
    if importlib.util.find_spec("triton") is None:
        return "it needs Triton: pip install triton (Linux)."
    return None


@register("backend", "cuda-graph", summary="Triton kernels, a decode step replayed as one launch", why_not=why_not)
class CudaGraph(Backend):
    name = "cuda-graph"

    def why_not(self, transformer: Any, cache: Any) -> str | None:
        if transformer.device.type != "cuda":
            return f"the model is on {transformer.device}: the captured step is for a GPU."
        if reason := why_not():
            return reason
        from labkit.backends import graph_step

        return graph_step.why_not(transformer, cache)

    def why_unpack(self, config: Any, *, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return f"their Triton products are for a GPU, and the model is on {device}"
        if why_not():
            return "there is no Triton to compute from them"
        from labkit.backends import graph_step

        return None if graph_step.why_not_config(config) is None else "the captured step does not know this model"

    def bind(self, transformer: Any, cache: Any, *, keep_hidden: bool = False) -> Step:
        from labkit.backends.graph_step import GraphStep

        return GraphStep(transformer, cache, keep_hidden=keep_hidden)
