"""Arithmetic on bytes in numpy or in torch, so that a format is described once.

numpy computes on one thread: PyTorch's operations share theirs out from 32,768 values on, and where other programs want
the cores, meeting again costs more than such an operation. torch computes where the bytes lie on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def bytes_of(raw: Tensor) -> Any:
    """The same memory: as an array of numpy's on a CPU, elsewhere the tensor itself."""
    return raw.numpy() if raw.device.type == "cpu" else raw


def tensor_of(values: Any) -> Tensor:
    """What ``bytes_of`` led to, as a tensor."""
    return values if isinstance(values, Tensor) else torch.from_numpy(values)


def columns(blocks: Any, start: int, stop: int) -> Any:
    """Bytes ``start`` to ``stop`` of each block, close together (n, stop - start): each block's are copied as one."""
    found = blocks[:, start:stop]
    if isinstance(found, Tensor):
        return found.contiguous()
    return found.view(f"V{stop - start}").copy().view(np.uint8)


def half(blocks: Any, column: int) -> Any:
    """The float16 at byte ``column`` of each block (n, 1)."""
    found = blocks[:, column : column + 2]
    return found.contiguous().view(torch.float16) if isinstance(found, Tensor) else found.view(np.float16)


def floats(values: Any) -> Any:
    """In float32."""
    return values.float() if isinstance(values, Tensor) else values.astype(np.float32)


def signed(values: Any) -> Any:
    """The same bytes as numbers from -128 to 127."""
    return values.view(torch.int8 if isinstance(values, Tensor) else np.int8)


def joined(first: Any, second: Any) -> Any:
    """Bytes one behind the other along the last axis, as many of each."""
    if isinstance(first, Tensor):
        return torch.cat((first, second), -1)
    whole = np.empty((*first.shape[:-1], 2), f"V{first.shape[-1]}")
    whole[..., 0], whole[..., 1] = (part.view(whole.dtype)[..., 0] for part in (first, second))
    return whole.view(np.uint8)


def shifts(like: Any, end: int, step: int = 1) -> Any:
    """0, step, ... below ``end``, a column (m, 1) of bytes."""
    found = np.arange(0, end, step, dtype=np.uint8)[:, None]
    return torch.from_numpy(found).to(like.device) if isinstance(like, Tensor) else found


def bits_of(packed: Any) -> Any:
    """(n, m) bytes to their bits (n, 8 m), each 0 or 1, the lowest first."""
    if isinstance(packed, Tensor):
        return (packed[..., None] >> shifts(packed, 8)[:, 0] & 1).flatten(-2)
    return np.unpackbits(packed, axis=-1, bitorder="little")
