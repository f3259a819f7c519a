"""One run's choices: the largest logit, or a draw whose chances ``sampling.shape_logits`` defines."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from labkit.decoding.on_cpu import draw, largest
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
            raise ValueError(
                "the model's logits are not finite (NaN or infinity): its weights are damaged, or its dtype is too "
                "narrow. Load it again, with dtype='fp32'."
            )
        self.remember([token_id])
        return token_id

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
