"""Lesson 09's exercise, round to nearest in groups, and its questions."""

from __future__ import annotations

import torch

from labkit.quant import Grid
from labkit.ui.exercise import Exercise


def _oracle(numbers: list[float], bits: int, group_size: int) -> list[float]:
    groups = torch.tensor(numbers).view(1, -1, group_size)
    grid = Grid(bits)
    found = grid.fit(groups)
    return grid.values(grid.round(groups, *found), *found).flatten().tolist()


GROUPS = Exercise(
    "round to nearest, in groups",
    cases=[
        ([0.0, 1.0, 2.0, 3.0], 2, 4),
        ([-1.0, 0.2, 0.9, 2.0, 10.0, 20.0, -10.0, 0.0], 3, 4),
        ([0.1, 0.23, 0.3, 0.41, -5.0, 6.0, 1.0, 2.2], 4, 2),
    ],
    oracle=_oracle,
    same=lambda a, b: (
        len(a) == len(b) and all(abs(x - y) <= 0.01 * max(1.0, abs(y)) for x, y in zip(a, b, strict=True))
    ),
    hints=(
        "A group's grid has 2**bits points from low to high, 0 among them: `low = min(0, *group)`, and so on.",
        "`scale = (high - low) / (2**bits - 1)`, `zero = round(-low / scale)`",
        "`q = round(w / scale) + zero`, and what it stands for is `scale * (q - zero)`; start again in each group.",
    ),
)

QUIZ = (
    (
        "A model in 4 bits is a quarter of the bytes of 16. When is a token four times faster?",
        {
            "Always": "Only where reading weights is all of the time. A prompt of 512 tokens is bound by arithmetic.",
            "When reading the weights is all that takes time": "Right: then bytes are time. Anything else stays.",
        },
        "When reading the weights is all that takes time",
    ),
    (
        "What does GPTQ do with the error that it makes on a column?",
        {
            "It makes that column's scale finer": "That is nearer to AWQ. GPTQ leaves the grid alone.",
            "It changes the columns that are still to be rounded": "Right: they make up for it, along the inputs' "
            "correlations. Uncorrelated inputs leave it nothing to do.",
        },
        "It changes the columns that are still to be rounded",
    ),
    (
        "Why groups of 64 and not of 128 on this model?",
        {
            "128 would lose too much": "Perhaps, but that is not why.",
            "576 inputs are not a multiple of 128": "Right: 576 = 9 × 64. A format with blocks of 256 cannot hold it.",
        },
        "576 inputs are not a multiple of 128",
    ),
)
