"""Rows of an embedding as float32, on one thread and without PyTorch's operations.

PyTorch looks them up on all its threads, which then go on looking for work for milliseconds on the cores that the
step's own threads are about to need: each barrier that meets one waits a time slice, 3 ms on Linux. And after a step
has swept the weights through the processor's caches, each of its operations starts cold: 0.1 ms, for one row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class Table:
    """A model's embedding: what its layers start from."""

    def __init__(self, transformer: Any) -> None:
        embedding, config = transformer.embedding, transformer.config
        head, weight = getattr(embedding, "head", None), embedding.weight.detach()
        self._transformer = transformer
        self._plain = config.embedding_scale == 1.0 and transformer.positions is None
        self._numbers: np.ndarray | None = None
        self._scales: np.ndarray | None = None
        self._bf16 = False
        if head is not None and head.kind == "int8" and weight.dtype == torch.float32:
            self._numbers, self._scales = head.weight.numpy()[:, : head.in_features], head.scales.numpy()
        elif head is None and weight.dtype == torch.float32:
            self._numbers = weight.numpy()
        elif head is None and weight.dtype == torch.bfloat16:
            self._numbers, self._bf16 = weight.view(torch.int16).numpy(), True

    def rows(self, ids: np.ndarray, opened: Any) -> np.ndarray:
        """What the layers see of ``ids`` (T,): (T, M) float32, fresh memory. ``opened`` knows the tokens' positions."""
        if not self._plain or self._numbers is None:
            return self._by_torch(ids, opened)
        which = slice(int(ids[0]), int(ids[0]) + 1) if len(ids) == 1 else ids  # a slice is the faster way to one row
        found = self._numbers[which]
        if self._bf16:
            return (found.astype(np.uint32) << np.uint32(16)).view(np.float32)
        found = found.astype(np.float32)
        if self._scales is not None:
            found *= self._scales[which][:, None]
        return found

    def _by_torch(self, ids: np.ndarray, opened: Any) -> np.ndarray:
        return self._transformer.embed(torch.from_numpy(ids), opened).float().contiguous().numpy()
