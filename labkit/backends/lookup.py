"""Rows of an embedding as float32, on one thread and without PyTorch's operations.

PyTorch looks them up on all its threads, which then go on looking for work for milliseconds on the cores that the
step's own threads are about to need: each barrier that meets one waits a time slice, 3 ms on Linux. And after a step
has swept the weights through the processor's caches, each of its operations starts cold: 0.1 ms, for one row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from labkit.kernels.cpu import plan


class Table:
    """A model's embedding: what its layers start from."""

    def __init__(self, transformer: Any) -> None:
        embedding, config = transformer.embedding, transformer.config
        head, weight = getattr(embedding, "head", None), embedding.weight.detach()
        self._transformer = transformer
        self._numbers: np.ndarray | None = None
        self._scales: np.ndarray | None = None
        self._kind, self._rounded = plan.FP32, weight.dtype == torch.bfloat16
        if config.embedding_scale != 1.0 or transformer.positions is not None:
            return
        if head is not None and head.kind == "int8":
            self._numbers, self._scales = head.weight.numpy()[:, : head.in_features], head.scales.numpy()
            self._kind = plan.PACKED
        elif head is None and weight.dtype == torch.float32:
            self._numbers = weight.numpy()
        elif head is None and weight.dtype == torch.bfloat16:
            self._numbers, self._kind = weight.view(torch.int16).numpy(), plan.BF16

    def cells(self) -> np.ndarray | None:
        """The table as ``tokens.look_up`` takes it; None where only ``rows`` can look up."""
        if self._numbers is None:
            return None
        scales = 0 if self._scales is None else self._scales.ctypes.data
        numbers = self._numbers.ctypes.data, self._numbers.strides[0]
        return np.array([self._kind, *numbers, scales, self._rounded], np.int64)

    def rows(self, ids: np.ndarray, opened: Any) -> np.ndarray:
        """What the layers see of ``ids`` (T,): (T, M) float32, fresh memory. ``opened`` knows the tokens' positions."""
        if self._numbers is None:
            return self._by_torch(ids, opened)
        which = slice(int(ids[0]), int(ids[0]) + 1) if len(ids) == 1 else ids  # a slice is the faster way to one row
        found = self._numbers[which]
        if self._kind == plan.BF16:
            return (found.astype(np.uint32) << np.uint32(16)).view(np.float32)
        found = found.astype(np.float32)
        if self._scales is not None:
            found *= self._scales[which][:, None]
            if self._rounded:
                bits = found.view(np.uint32)
                bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
                bits &= np.uint32(0xFFFF0000)
        return found

    def _by_torch(self, ids: np.ndarray, opened: Any) -> np.ndarray:
        return self._transformer.embed(torch.from_numpy(ids), opened).float().contiguous().numpy()
