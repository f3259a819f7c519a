"""Median and range of repeats, and the least time that this machine's ceilings allow: what a measured figure shows."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from labkit.model.config import dtype_name
from labkit.perf import hardware
from labkit.perf.cost import Cost
from labkit.perf.forecast import peak_dtype
from labkit.perf.machine import Machine
from labkit.ui.words import say

CEILING = "ceiling"
"""In the name of each line that stands for what cannot be passed: a reader, and a test, find it by this word."""


def error_bars(turns: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Plotly's ``error_y`` from the lowest to the highest value of each dot's repeats, around their median.

    >>> error_bars([[1.0, 2.0, 5.0]])["array"]
    [3.0]
    """
    middle = [median(values) for values in turns]
    return {
        "type": "data",
        "symmetric": False,
        "array": [max(values) - at for values, at in zip(turns, middle, strict=True)],
        "arrayminus": [at - min(values) for values, at in zip(turns, middle, strict=True)],
        "thickness": 1.2,
    }


def this_machine(job: Any, model: Any) -> Machine:
    """The ceilings of the model's device: read back, or measured now, which ``job`` shows."""

    def told(share: float, what: str) -> None:
        job.progress(share, say("once: {what}", what=what))

    return hardware.machine(model.device.type, progress=told)


def least_s(machine: Machine, model: Any, cost: Cost) -> float:
    """Seconds below which no step of this cost comes: its bytes read at the measured bandwidth, or its FLOPs at the
    rate of a large product, whichever takes longer."""
    peak = machine.peak_flops(peak_dtype(machine, dtype_name(model.dtype)))
    return max(cost.bytes / machine.read.value, cost.flops / peak)
