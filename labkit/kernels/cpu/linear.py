"""``x W^T + b`` for many tokens through the compiled product: what packed linears call during a compiled prefill."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

_here = threading.local()


@contextlib.contextmanager
def compiled_products(n_threads: int) -> Iterator[None]:
    """Within this block, on this thread, packed linears on the CPU compute with the compiled product."""
    before = getattr(_here, "n_threads", 0)
    _here.n_threads = n_threads
    try:
        yield
    finally:
        _here.n_threads = before


def active() -> bool:
    """Whether the compiled product is on, on this thread."""
    return bool(getattr(_here, "n_threads", 0))


def multiply(row: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., K) times the matrix that ``row`` describes (a row of ``plan.Plan.linears``): (..., N), in x's dtype."""
    from labkit.kernels.cpu import cells, machine_code, memory, plan, team

    squad = team.team(_here.n_threads)
    linear = np.asarray(row, np.int64)
    n_out, n_in = int(linear[plan.N_OUT]), int(linear[plan.N_IN])
    flat = x.reshape(-1, n_in).float()
    flat = flat.contiguous()
    out = torch.empty((len(flat), n_out + -n_out % 4), dtype=torch.float32)
    work = torch.empty(memory.product_bytes(len(flat), n_in, squad.n_threads), dtype=torch.uint8)
    job = np.zeros(cells.N_CELLS, np.int64)
    job[cells.FUNCTION] = machine_code.address("matmul")
    job[[cells.LINEAR_AT, cells.INPUT, cells.INPUT_STRIDE]] = linear.ctypes.data, flat.data_ptr(), flat.stride(0) * 4
    job[[cells.OUTPUT, cells.OUTPUT_STRIDE, cells.N_INPUTS]] = out.data_ptr(), out.stride(0) * 4, len(flat)
    job[cells.SCRATCH] = (work.data_ptr() + 63) // 64 * 64
    squad.run(job)
    y = out[:, :n_out]
    if bias is not None:
        y = y + bias.float()
    return y.reshape(*x.shape[:-1], n_out).to(x.dtype)
