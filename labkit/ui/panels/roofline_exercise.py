"""Lesson 07's exercise and its three questions."""

from __future__ import annotations

from labkit.perf.machine import Machine, Rate, sheet
from labkit.ui.exercise import Exercise


def _attainable(intensity: float, peak: float, bandwidth: float) -> float:
    """What ``Machine.attainable_flops`` computes, of plain numbers."""
    machine = Machine(**{**vars(sheet("T4")), "read": Rate.exactly(bandwidth), "matmul": {"fp32": Rate.exactly(peak)}})
    return machine.attainable_flops(intensity, "fp32")


ROOFLINE = Exercise(
    "the roofline",
    cases=[(0.5, 100e9, 20e9), (5.0, 100e9, 20e9), (300.0, 100e9, 20e9), (206.0, 989e12, 4.8e12)],
    oracle=_attainable,
    same=lambda a, b: abs(a - b) <= 1e-6 * abs(b),
    hints=(
        "Two limits hold at once: the multipliers, and the memory that has to feed them.",
        "Memory delivers `bandwidth` bytes a second, and each byte pays for `intensity` FLOPs.",
        "`min(peak, bandwidth * intensity)`",
    ),
)

QUIZ = (
    (
        "A decode step shows 3 % MFU and 85 % MBU. What would you change first?",
        {
            "Fewer bits a weight": "Yes. Memory binds, and the weights are most of the bytes.",
            "A faster matrix product": "No. The multipliers already wait 97 % of the time.",
            "Nothing can be right with 3 %": "No. It is close to the best that one token at a time allows.",
        },
        "Fewer bits a weight",
    ),
    (
        "Why does a prompt of 64 tokens take far less than 64 decode steps?",
        {
            "Its weights are read once, not 64 times": "Yes: the bytes stay, only the FLOPs grow.",
            "Prefill skips layers": "No. Every token goes through every layer, as in decode.",
            "Attention is cheaper for it": "No. The scores are the same ones, computed together.",
        },
        "Its weights are read once, not 64 times",
    ),
    (
        "MFU and MBU are both at 10 %. Which ceiling binds?",
        {
            "Neither: overhead does": "Yes. Look for many small operations, waiting threads, or a busy machine.",
            "Memory": "No. Memory could deliver ten times as much in that time.",
            "Arithmetic": "No. The multipliers could do ten times as much in that time.",
        },
        "Neither: overhead does",
    ),
)
