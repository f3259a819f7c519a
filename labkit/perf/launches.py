"""How many operations a step sends to the device: the overhead of a machine that is known by its data sheet only."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.model.config import ModelConfig
from labkit.perf.cost import StepCost
from labkit.perf.machine import Machine
from labkit.perf.probe import Bench, Engine, Point, shell_of

VIEWS = ("view", "reshape", "transpose", "permute", "slice", "select", "expand", "unsqueeze", "squeeze", "detach")
"""Operations that only relabel memory: the device never hears of them. Also split, chunk, unbind and t."""


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0].lstrip("_")
        if not name.startswith(VIEWS) and name not in ("t", "split", "chunk", "unbind", "alias"):
            self.n += 1
        return func(*args, **(kwargs or {}))


@lru_cache(maxsize=64)
def launches(config: ModelConfig, *, dtype: str = "fp32") -> tuple[int, int]:
    """(operations a layer, operations outside the layers) of one plain decode step, counted on the model's shell."""
    shell = shell_of(config)
    one = type(config)(**{**vars(shell), "layers": shell.layers[:1]})
    counts = []
    for found in (one, type(config)(**{**vars(shell), "layers": shell.layers[:1] * 2})):
        bench = Bench(found, Engine(dtype=dtype))
        with torch.inference_mode(), _Counter() as counter:
            cache = bench._cache(Point("shell", 1))
            counter.n = 0
            bench.transformer(torch.zeros(1, dtype=torch.int64), cache, rows="last")
        counts.append(counter.n)
    per_layer = counts[1] - counts[0]
    return per_layer, counts[0] - per_layer


def sheet_seconds(config: ModelConfig, machine: Machine, step: StepCost) -> dict[str, tuple[float, float]]:
    """Phase -> (overhead, time) on a data sheet's machine: its floor or its launches, whichever is longer."""
    per_layer, outside = launches(config)
    peak = max(rate.value for name, rate in machine.matmul.items() if name != "int8")
    found = {}
    for name, cost in step.phases.items():
        floor = max(cost.bytes / machine.read.value, cost.flops / peak)
        found[name] = (0.0, floor)
    launched = (per_layer * config.n_layers + outside) * machine.dispatch_s.value
    floor = sum(total for _, total in found.values())
    found["schedule"] = (max(0.0, launched - floor), max(0.0, launched - floor))
    return found
