"""Rows of an embedding as float32, on one thread and without PyTorch's operations.

PyTorch looks them up on all its threads, which then go on looking for work for milliseconds on the cores that the
step's own threads are about to need: each barrier that meets one waits a time slice, 3 ms on Linux. And after a step
has swept the weights through the processor's caches, each of its operations starts cold: 0.1 ms, for one row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from labkit.kernels import panel_layout
from labkit.kernels.cpu import plan

N_AT_ONCE = 256
"""Rows that are unpacked together: what is in between stays in the cache."""


class Table:
    """A model's embedding: what its layers start from."""

    def __init__(self, transformer: Any) -> None:
        embedding, config = transformer.embedding, transformer.config
        head, weight = getattr(embedding, "head", None), embedding.weight.detach()
        self._transformer = transformer
        self._numbers: np.ndarray | None = None
        self._panels: PanelRows | None = None
        self._kind, self._rounded = plan.FP32, weight.dtype == torch.bfloat16
        if config.embedding_scale != 1.0 or transformer.positions is not None:
            return
        if head is not None:
            if head.why_not_compiled is None and weight.dtype in (torch.float32, torch.bfloat16):
                self._panels = PanelRows(head.panels())
        elif weight.dtype == torch.float32:
            self._numbers = weight.numpy()
        elif weight.dtype == torch.bfloat16:
            self._numbers, self._kind = weight.view(torch.int16).numpy(), plan.BF16

    def cells(self) -> np.ndarray | None:
        """The table as ``tokens.look_up`` takes it; None where only ``rows`` can look up."""
        if self._numbers is None:
            return None
        numbers = self._numbers.ctypes.data, self._numbers.strides[0]
        return np.array([self._kind, *numbers, 0, self._rounded], np.int64)

    def rows(self, ids: np.ndarray, opened: Any) -> np.ndarray:
        """What the layers see of ``ids`` (T,): (T, M) float32, fresh memory. ``opened`` knows the tokens' positions."""
        if self._panels is not None:
            return self._panels(ids, rounded=self._rounded)
        if self._numbers is None:
            return self._by_torch(ids, opened)
        which = slice(int(ids[0]), int(ids[0]) + 1) if len(ids) == 1 else ids  # a slice is the faster way to one row
        found = self._numbers[which]
        if self._kind == plan.BF16:
            return (found.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return found.astype(np.float32)

    def _by_torch(self, ids: np.ndarray, opened: Any) -> np.ndarray:
        return self._transformer.embed(torch.from_numpy(ids), opened).float().contiguous().numpy()


class Given:
    """Inputs that are no rows of a table: the next step's tokens are what ``x`` (T, M) float32 holds, and the ids that
    it is called with only say how many."""

    def __init__(self) -> None:
        self.x = np.empty((0, 0), np.float32)

    def cells(self) -> None:
        return None

    def rows(self, ids: np.ndarray, opened: Any) -> np.ndarray:
        return self.x


class PanelRows:
    """Rows of a packed matrix out of the panels that the head's product reads: no second copy of the table."""

    def __init__(self, panels: panel_layout.Panels) -> None:
        self._panels = panels
        packed = panels.codes.numpy()
        self._planes, at = [], 0
        for width in panel_layout.PLANES[panels.bits]:
            plane = packed[..., at : at + 16 * width]
            shape = (*packed.shape[:2], 2, 16, 4) if width == 8 else (*packed.shape[:2], 16, width)
            self._planes.append((width, np.lib.stride_tricks.as_strided(plane, shape, _strides(plane, width))))
            at += 16 * width
        self._scales = panels.scales.numpy()
        self._minima = None if panels.minima is None else panels.minima.numpy()

    def __call__(self, ids: np.ndarray, *, rounded: bool) -> np.ndarray:
        """(T, K) float32; ``rounded`` to bf16, as a model of that dtype has them."""
        out = np.empty((len(ids), self._panels.n_in), np.float32)
        for at in range(0, len(ids), N_AT_ONCE):
            out[at : at + N_AT_ONCE] = self._some(ids[at : at + N_AT_ONCE])
        if rounded:
            bits = out.view(np.uint32)
            bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            bits &= np.uint32(0xFFFF0000)
        return out

    def _some(self, ids: np.ndarray) -> np.ndarray:
        made, (panel, row) = self._panels, divmod(ids, panel_layout.ROWS)
        values = self._codes(panel, row).astype(np.float32).reshape(len(ids), -1)
        scales = self._a_code(self._scales, panel, row)
        if self._minima is None:
            values -= np.float32(made.zero)
            values *= scales
        elif self._minima.dtype == np.uint8:
            values -= self._a_code(self._minima, panel, row)
            values *= scales
        else:
            values *= scales
            values += self._a_code(self._minima, panel, row)
        return values[:, : made.n_in]

    def _codes(self, panel: np.ndarray, row: np.ndarray) -> np.ndarray:
        """(T, units, 8): uint8, or int8 where there are 8 bits."""
        found, shift = None, 0
        for width, plane in self._planes:
            if width == 8:
                return plane[panel, :, :, row].view(np.int8)
            part = plane[panel, :, row]  # (T, units, width)
            codes = np.empty((*part.shape[:2], panel_layout.UNIT), np.uint8)
            if width == 4:
                codes[..., :4], codes[..., 4:] = part & 15, part >> 4
            else:
                for i, k in enumerate(panel_layout.ORDER):
                    codes[..., k] = part[..., i * width // 8] >> (i * width % 8) & (2**width - 1)
            found = codes if found is None else found | codes << shift
            shift += width
        assert found is not None
        return found

    def _a_code(self, values: np.ndarray, panel: np.ndarray, row: np.ndarray) -> np.ndarray:
        """(P, G, 16) -> (T, K' or 1) float32."""
        found = values[panel, :, row].astype(np.float32)
        group = self._panels.group
        return found.repeat(group, axis=1)[:, : self._panels.codes.shape[1] * panel_layout.UNIT] if group else found


def _strides(plane: np.ndarray, width: int) -> tuple[int, ...]:
    a, b, _ = plane.strides
    return (a, b, 64, 4, 1) if width == 8 else (a, b, width, 1)
