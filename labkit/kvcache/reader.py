"""Which kernel reads a stored cache here, and what a step tells it.

A reader answers ``attend`` for steps of few tokens a sequence (decoding, checking a draft), where the stored bytes
are what costs. Where no kernel is at hand the caches read their storage piece by piece in PyTorch.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np

    from labkit.kvcache.blocks import BlockCache

COMPILING = "the CPU kernel is being compiled in the background (once)"
SHORT_TOKENS = 8
"""New tokens of one sequence up to which a kernel that reads the cache once for each is the faster way."""


class Rows(NamedTuple):
    """For each new token: its table row, first visible position, end, tokens that lie in blocks. (T, 4)."""

    array: np.ndarray
    n_visible: int
    """Stored tokens that are read in all."""


class StepRows:
    """The open step's short segments, as a kernel wants them: one ``Rows`` for each window among the layers."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self.short = [segment for segment in cache.segments if segment.n_new <= SHORT_TOKENS]
        self.long = [segment for segment in cache.segments if segment.n_new > SHORT_TOKENS]
        self.short_rows = [row for s in self.short for row in range(s.row, s.row + s.n_new)] if self.long else []
        self._rows: dict[int | None, Rows] = {}

    def of(self, window: int | None) -> Rows:
        if window not in self._rows:
            import numpy as np

            cache, rows = self._cache, []
            for segment in self.short:
                row = cache._rows[segment.sequence_id]
                blocked = cache.n_readable(segment)
                for last in range(segment.n_past + 1, segment.n_total + 1):
                    rows.append((row, 0 if window is None else max(0, last - window), last, min(blocked, last)))
            array = np.array(rows, dtype=np.int64)
            self._rows[window] = Rows(array, int((array[:, 2] - array[:, 1]).sum()))
        return self._rows[window]


class CpuReader:
    """``labkit.kernels.cpu.stored`` over a cache's tensors."""

    def __init__(self, cache: BlockCache, kernel: Any) -> None:
        self.cache, self.kernel = cache, kernel
        self.specs = [kernel.make_spec(**cache.spec(layer_idx)) for layer_idx in range(len(cache.layers))]
        self.table = cache.table.numpy()
        self.values = [sum(entry.n_values for entry in layer.entries) for layer in cache.layers]

    def attend(self, layer_idx: int, q: Tensor, rows: Rows, scale: float, softcap: float | None) -> Tensor:
        out = self.kernel.attend(
            self.specs[layer_idx],
            self.table,
            rows.array,
            q.float().contiguous().numpy(),
            n_reads=rows.n_visible * self.values[layer_idx],
            scale=scale,
            n_sinks=self.cache.layers[layer_idx].n_sinks,
            softcap=softcap,
        )
        return torch.from_numpy(out).to(q.dtype)


class TritonReader:
    """``labkit.kernels.triton.stored`` over a cache's tensors."""

    def __init__(self, cache: BlockCache, kernel: Any) -> None:
        self.cache, self.kernel = cache, kernel

    def attend(self, layer_idx: int, q: Tensor, rows: Rows, scale: float, softcap: float | None) -> Tensor:
        return self.kernel.attend(
            self.cache.stored(layer_idx),
            self.cache.table,
            torch.from_numpy(rows.array).to(q.device, torch.int32, non_blocking=True),
            q,
            longest=int((rows.array[:, 2] - rows.array[:, 1]).max()),
            scale=scale,
            n_sinks=self.cache.layers[layer_idx].n_sinks,
            softcap=softcap,
        )


def make_reader(cache: BlockCache) -> tuple[Any, str | None]:
    """The reader for a cache's storage on its device, or None and why there is none (yet)."""
    if cache.device.type == "cuda":
        try:
            from labkit.kernels.triton import stored
        except ImportError:
            return None, "Triton is not installed here"
        return TritonReader(cache, stored), None
    if cache.device.type != "cpu":
        return None, f"there is no kernel for {cache.device.type}"
    compiling = compile_cpu_kernel()
    if not compiling.done():
        return None, COMPILING
    kernel, reason = compiling.result()
    if kernel is None:
        return None, reason
    for layer_idx in range(len(cache.layers)):
        reason = kernel.why_not(**cache.kernel_sizes(layer_idx))
        if reason:
            return None, reason
    return CpuReader(cache, kernel), None


@cache
def compile_cpu_kernel() -> Future[tuple[Any, str | None]]:
    """Start compiling in the background; the kernel, or None and why it cannot be had. ``.result()`` waits."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="labkit-compile")
    future = pool.submit(_compile)
    pool.shutdown(wait=False)
    return future


def _compile() -> tuple[Any, str | None]:
    try:
        from labkit.kernels.cpu import stored

        stored.compile_now()
    except Exception as error:  # noqa: BLE001 - whatever the platform lacks, PyTorch reads the cache instead
        return None, f"numba cannot compile the CPU kernel here: {error}"
    return stored, None
