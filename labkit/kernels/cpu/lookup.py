"""Rows of an embedding as float32, on one thread.

PyTorch looks them up on all its threads, which then go on looking for work for milliseconds on the cores that the
step's own threads are about to need: each barrier that meets one waits a time slice, 3 ms on Linux.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def rows(embedding: Any, token_ids: Tensor) -> Tensor:
    """The rows of ``token_ids``, (T, M) float32: what ``embedding(token_ids).float()`` gives."""
    ids, head = token_ids.numpy(), getattr(embedding, "head", None)
    if head is not None and head.kind == "int8" and embedding.weight.dtype == torch.float32:
        found = head.weight.numpy()[ids, : head.in_features].astype(np.float32)
        found *= head.scales.numpy()[ids, None]
        return torch.from_numpy(found)
    weight = embedding.weight.detach()
    if head is None and weight.dtype == torch.float32:
        return torch.from_numpy(weight.numpy()[ids])
    if head is None and weight.dtype == torch.bfloat16:
        wide = weight.view(torch.int16).numpy()[ids].astype(np.uint32) << np.uint32(16)
        return torch.from_numpy(wide.view(np.float32))
    return embedding(token_ids).float()
