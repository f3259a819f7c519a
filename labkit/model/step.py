"""What one forward call carries through the layers besides the hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from labkit.kvcache import KVCache
from labkit.model import rope as rotary
from labkit.model.config import Rope
from labkit.perf.timer import NULL_TIMER


class Cancelled(Exception):
    """The run was stopped between two layers."""


def _never() -> bool:
    return False


@dataclass
class Step:
    """T tokens on their way through the model: their positions, their cache, and the watch that times them."""

    positions: Tensor
    cache: KVCache
    timer: Any = NULL_TIMER
    should_stop: Callable[[], bool] = _never
    _angles: dict[tuple[Rope, int, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def angles(self, rope: Rope, d_head: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin for this step's positions, made once however many layers share the same rotation."""
        key = (rope, d_head, dtype)
        if key not in self._angles:
            self._angles[key] = rotary.angles(rope, d_head, self.positions, dtype)
        return self._angles[key]

    def check(self) -> None:
        """Raise Cancelled when the run was asked to stop: called between layers, so Stop is prompt."""
        if self.should_stop():
            raise Cancelled
