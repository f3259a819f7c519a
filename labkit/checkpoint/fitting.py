"""Whether a model's weights fit, asked when their number is known and before anything is allocated."""

from __future__ import annotations

import torch

from labkit.model.config import dtype_name
from labkit.perf.device import free_bytes
from labkit.perf.memory import RESERVE_SHARE

GB = 1e9


def check_fits(n_weights: int, *, device: torch.device, dtype: torch.dtype, name: str) -> None:
    """Raise MemoryError, naming what would make it fit, when the weights are larger than the memory that is free.

    Weights in fewer bits are packed from these, so they do not help here: they make room for cache and users after.
    """
    held = dtype_name(dtype)
    needed = n_weights * dtype.itemsize
    usable = free_bytes(device.type) * (1 - RESERVE_SHARE)
    if needed <= usable:
        return
    message = (
        f"{name} does not fit: its weights take {needed / GB:.1f} GB in {held}, and {usable / GB:.1f} GB are free on "
        f"{device.type}. Nothing was loaded. "
    )
    if held == "fp32" and needed / 2 <= usable:
        raise MemoryError(f"{message}It fits with dtype='bf16' ({needed / 2 / GB:.1f} GB).")
    raise MemoryError(f"{message}Choose a smaller model (labkit.models() lists some), or free memory.")
