"""One run's choices: the largest logit, or a draw whose chances ``sampling.shape_logits`` defines."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from labkit.decoding.on_cpu import candidates, draw, largest
from labkit.decoding.sampling import Sampling, shape_logits


class Sampler:
    """Draws one run's tokens; its source of chance is its own, so a seed reproduces the run (on this device)."""

    def __init__(self, sampling: Sampling, *, seed: int, device: torch.device | str) -> None:
        self.sampling = sampling
        self._seen: list[int] = []
        on_cpu = torch.device(device).type == "cpu"
        self._chance = random.Random(seed) if on_cpu else torch.Generator(device=device).manual_seed(seed)

    def remember(self, token_ids: Sequence[int]) -> None:
        """Count these tokens as seen, for the repetition penalty."""
        if self.sampling.repetition_penalty != 1.0:
            self._seen.extend(token_ids)

    @property
    def draws(self) -> bool:
        """Whether chance has a part in it."""
        return self.sampling.temperature != 0.0

    @property
    def takes_largest(self) -> bool:
        """Whether the choice is the largest logit's, which a step may make itself."""
        return self.sampling.temperature == 0.0 and self.sampling.repetition_penalty == 1.0

    def __call__(self, logits: Tensor) -> int:
        """One token id from logits (V,). Raises ValueError when they are not numbers."""
        if isinstance(self._chance, random.Random):
            token_id = self._on_cpu(logits.detach().float().numpy(), self._chance)
        else:
            token_id = self._on_device(logits, self._chance)
        return self.accept(token_id)

    def accept(self, token_id: int) -> int:
        """A choice that is made: a step's own, say. Raises ValueError for -1, which means that there is none."""
        if token_id < 0:
            raise _not_finite()
        self.remember([token_id])
        return token_id

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Choices made within are forgotten at the end: those of a drafter, which the target may not share."""
        n_seen = len(self._seen)
        try:
            yield
        finally:
            del self._seen[n_seen:]

    def chances(self, logits: Tensor) -> np.ndarray:
        """What a draw from logits (V,) is made from, after every cut-off: (V,) float64, sum 1. Raises ValueError when
        the logits are not numbers."""
        if isinstance(self._chance, random.Random):
            found = candidates(logits.detach().float().numpy(), self.sampling, self._seen)
            if found is None:
                raise _not_finite()
            chances = np.zeros(logits.shape[-1])
            chances[slice(None) if found.ids is None else found.ids] = found.weights
        else:
            seen = torch.tensor(self._seen, dtype=torch.int64, device=logits.device) if self._seen else None
            chances = shape_logits(logits, self.sampling, seen).softmax(0).cpu().numpy().astype(np.float64)
            if not math.isfinite(chances[0]):
                raise _not_finite()
        return chances / chances.sum()

    def draw(self, logits: Tensor) -> tuple[int, np.ndarray]:
        """A token and the distribution (V,) that it was drawn from."""
        chances = self.chances(logits)
        token_id = self._draw(chances)
        self.remember([token_id])
        return token_id, chances

    def weigh(self, logits: Tensor, guess: int, proposed: np.ndarray) -> int:
        """A token distributed as a draw from logits (V,), given a ``guess`` drawn from ``proposed`` (V,): the guess
        itself with chance min(1, p / q), else a draw from what p has more than q (arXiv 2211.17192, algorithm 1)."""
        wanted = self.chances(logits)
        if self._uniform() * proposed[guess] < wanted[guess]:
            token_id = guess
        else:
            more = np.maximum(wanted - proposed, 0.0)
            # p and q alike to the last bits: nothing is left, and a draw from p is right.
            token_id = self._draw(more if more.sum() > 0.0 else wanted)
        self.remember([token_id])
        return token_id

    def _uniform(self) -> float:
        """In [0, 1)."""
        if isinstance(self._chance, random.Random):
            return self._chance.random()
        return float(torch.rand((), generator=self._chance, device=self._chance.device))

    def _draw(self, weights: np.ndarray) -> int:
        reached = weights.cumsum()
        return int(reached.searchsorted(reached[-1] * (1.0 - self._uniform())))  # in (0, sum]: never a weight of 0

    def _on_cpu(self, logits: np.ndarray, chance: random.Random) -> int:
        if self.sampling.temperature == 0.0:
            return largest(logits, self.sampling, self._seen)
        return draw(logits, self.sampling, self._seen, chance)

    def _on_device(self, logits: Tensor, chance: torch.Generator) -> int:
        """The same by PyTorch's operations, wherever the logits are; the host waits for the device once."""
        seen = torch.tensor(self._seen, dtype=torch.int64, device=logits.device) if self._seen else None
        shaped = shape_logits(logits, self.sampling, seen)
        if self.sampling.temperature == 0.0:
            proof, index = shaped.max(0)
        else:  # the smallest of exponential times, each at the rate of its probability, is a draw
            chances = shaped.softmax(0)
            proof, index = chances.sum(), (chances / torch.empty_like(chances).exponential_(generator=chance)).argmax()
        token_id, number = torch.stack((index.float(), proof)).tolist()  # exact to 2^24 tokens; MPS has no float64
        return int(token_id) if math.isfinite(number) else -1


def _not_finite() -> ValueError:
    return ValueError(
        "the model's logits are not finite (NaN or infinity): its weights are damaged, or its dtype is too "
        "narrow. Load it again, with dtype='fp32'."
    )
