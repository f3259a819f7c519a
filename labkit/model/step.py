"""What one forward call carries through the layers besides the hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
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
    """T tokens on their way through the model: their cache, which knows their positions, and those who look on."""

    cache: KVCache
    timer: Any = NULL_TIMER
    should_stop: Callable[[], bool] = _never
    watch: Any = None
    """Takes named activations (``labkit.model.watch``); None, the usual case, costs nothing."""
    frequencies: dict[Any, Tensor] = field(default_factory=dict)
    """Rotary frequencies by (rope, d_head, length): the model's own, so that a step need not make them."""
    token_ids: Tensor | None = None
    """(T,), once they were embedded: V4's first layers choose experts by them."""
    _angles: dict[tuple[Rope, int, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @cached_property
    def positions(self) -> Tensor:
        """Of each token in its sequence, (T,) int64."""
        return self.cache.positions()

    def angles(self, rope: Rope, d_head: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin for this step's positions, made once however many layers share the same rotation.

        A scaling that depends on the text's length goes by what the cache says (``turned_for``), else by what it may
        hold: known from the first token, so that early keys and late queries are turned alike.
        """
        key = (rope, d_head, dtype)
        if key not in self._angles:
            made = self._frequencies_of(rope, d_head)
            self._angles[key] = rotary.turn(made, self.positions, dtype, rotary.attention_factor(rope))
        return self._angles[key]

    def angles_at(self, positions: Tensor, rope: Rope, d_head: int) -> tuple[Tensor, Tensor]:
        """The same for other positions of the same cache, float32: for kernels that look theirs up."""
        made = self._frequencies_of(rope, d_head)
        return rotary.turn(made, positions, torch.float32, rotary.attention_factor(rope))

    def rope_length(self, rope: Rope) -> int:
        """The length of sequence that the rotation is scaled for; 0 when it does not depend on any."""
        return (self.cache.turned_for or self.cache.capacity_tokens) if rotary.depends_on_length(rope) else 0

    def _frequencies_of(self, rope: Rope, d_head: int) -> Tensor:
        length = self.rope_length(rope)
        made = self.frequencies.get((rope, d_head, length))
        if made is None:
            made = rotary.inverse_frequencies(rope, d_head, length).to(self.cache.device)
            self.frequencies[rope, d_head, length] = made
        return made

    def check(self) -> None:
        """Raise Cancelled when the run was asked to stop: called between layers, so Stop is prompt."""
        if self.should_stop():
            raise self.cancelled()

    @staticmethod
    def cancelled() -> Cancelled:
        """For a backend that has stopped on its own way."""
        return Cancelled()
