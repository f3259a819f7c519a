# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
"""Kernels that follow each other closely: the next one starts, and asks for its weights, while the last one ends.

On Hopper and later a kernel may be launched before the one it depends on is done (programmatic dependent launch): it
waits on the device, after it has asked for what does not depend on anybody. Elsewhere these do nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def await_previous(CHAINED: tl.constexpr):
    """Wait until all that the kernel before wrote is there; then let the next one be launched.

    In this order, so that before its own wait a kernel runs beside its predecessor alone."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@lru_cache(maxsize=16)
def _can_chain(device: torch.device) -> bool:
    if torch.cuda.get_device_capability(device)[0] < 9:
        return False
    return hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")


def chained(device: torch.device) -> dict[str, Any]:
    """The launch options of a kernel that calls ``await_previous``."""
    if device.type == "cuda" and _can_chain(device):
        return {"CHAINED": True, "launch_pdl": True}
    return {"CHAINED": False}
