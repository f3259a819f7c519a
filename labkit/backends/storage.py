"""Where a cache's entries lie, as numbers for the compiled step: the last columns of the layers' table, and ``held``.

    InPlace    the compiled step writes and reads the cache's own memory
    Staging    one sequence's run into a cache of another kind: it attends to its tokens in memory of its own, as they
               are, and to what the cache gives back of those before; the cache stores them when all layers are done

A cache says what may be done in place: ``in_place_tokens`` new tokens of a sequence at most, lying as ``rows_at``
(rows beside each other, one run or a ring a sequence) or ``spec`` (blocks) describe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.backends.step import Rows
from labkit.kernels.cpu import cells, machine_code, memory, plan, stored_spec
from labkit.kvcache.blocks import BlockCache

NUMBERS = {torch.float32: plan.FP32, torch.bfloat16: plan.BF16}


def why_not(cache: Any) -> str | None:
    """Why the compiled step cannot work on this cache; None when it can."""
    if cache.dtype not in NUMBERS:
        return f"a {cache.dtype} cache has no compiled step."
    if cache.keeps_history and not cache.in_place_tokens:
        return f"the {cache.kind} cache has no compiled step."
    if isinstance(cache, BlockCache):
        for layer_idx in range(len(cache.layers)):
            if reason := stored_spec.why_not(**cache.kernel_sizes(layer_idx)):
                return f"{reason}."
    return None


class _Cells:
    """What every storage tells the compiled step about the open step's tokens."""

    def __init__(self, layers: np.ndarray, *, as_panels: bool) -> None:
        self.layers = layers
        """The layers' table, a copy that is this storage's own."""
        self.as_panels = as_panels
        """Whether eight neighbouring keys always lie beside each other, so that panels can be made of them."""
        self.held = np.zeros(cells.N_HELD, np.int64)
        self.layers_at, self.held_at = layers.ctypes.data, self.held.ctypes.data
        self.tile_tokens = memory.CODED_TILE if layers[:, plan.CODED].any() else memory.TILE
        self.own_floats = memory.own_floats(layers)
        self.n_keys = 0
        """Of the longest run that meets its keys as panels."""
        self._one, self._first = np.zeros((1, 2), np.int64), np.zeros(1, np.int64)
        self._kept: tuple[np.ndarray, ...] = ()

    def _place_one(self, position: int, slot: int) -> None:
        """One token of one sequence, the usual case."""
        held, self.n_keys = self.held, 0
        self._one[0, 0], self._one[0, 1] = position, slot
        held[cells.N_TILES] = position // self.tile_tokens + 1
        if not self._kept or self._kept[0] is not self._one:
            self._kept = self._one, self._first
            held[[cells.TOKENS, cells.LASTS, cells.FEW]] = self._one.ctypes.data, *[self._first.ctypes.data] * 2
            held[[cells.N_LASTS, cells.N_FEW, cells.N_RUNS]] = 1, 1, 0

    def _place(self, parts: list[tuple[int, int, int]], rows: Rows, ends: list[int]) -> None:
        """parts: (first position, tokens, slot) of each sequence in turn; ends: rows of the sequences' last tokens."""
        places = [(at, slot) for first, n, slot in parts for at in range(first, first + n)]
        runs, few, row, self.n_keys = [], [], 0, 0
        for first, n, _ in parts:
            if self.as_panels and n >= memory.PANEL_TOKENS:
                runs.append((row, n))
                self.n_keys = max(self.n_keys, first + n)
            else:
                few += range(row, row + n)
            row += n
        lasts = list(range(row)) if rows == "all" else ends
        kept = [np.array(found, np.int64) for found in (places, lasts, runs, few)]
        held, self._kept = self.held, tuple(kept)
        held[[cells.TOKENS, cells.LASTS, cells.RUNS, cells.FEW]] = [found.ctypes.data for found in kept]
        held[[cells.N_LASTS, cells.N_RUNS, cells.N_FEW]] = len(lasts), len(runs), len(few)
        held[cells.N_TILES] = max((places[i][0] for i in few), default=0) // self.tile_tokens + 1

    @property
    def lasts(self) -> np.ndarray:
        """Rows of the tokens that logits are wanted after."""
        return self._kept[1]

    def _set_rows(self, idx: int, visible: Any, number: int, rows: dict[str, int]) -> None:
        row = self.layers[idx]
        row[[plan.WINDOW, plan.N_SINKS, plan.CACHE_FORMAT]] = visible.window or 0, visible.n_sinks, number
        row[[plan.K_CACHE, plan.V_CACHE, plan.HEAD_STRIDE, plan.SLOT_STRIDE, plan.RING, plan.RING_SINKS]] = [
            rows[name] for name in ("k", "v", "head_stride", "slot_stride", "ring", "ring_sinks")
        ]


class InPlace(_Cells):
    """The cache's own memory."""

    def __init__(self, cache: Any, layers: np.ndarray) -> None:
        self.cache = cache
        self.in_blocks = isinstance(cache, BlockCache)
        if self.in_blocks:
            self._specs = [stored_spec.make_spec(**cache.spec(idx)) for idx in range(len(cache.layers))]
            layers[:, plan.SPEC] = [spec.ctypes.data for spec in self._specs]
            kinds = np.array([spec[stored_spec.KIND] for spec in self._specs])
            layers[:, plan.CODED], layers[:, plan.CACHE_FORMAT] = kinds > stored_spec.BF16, kinds
        super().__init__(layers, as_panels=self.in_blocks and not layers[:, plan.CODED].any())
        if self.in_blocks:
            windows = [layer.window for layer in cache.layers]
            self._by_window = {w: np.flatnonzero([w == other for other in windows]) for w in set(windows)}
            table = cache.table.numpy()
            self.held[[cells.BLOCK_TABLE, cells.N_TABLES, cells.N_BLOCKS]] = table.ctypes.data, *table.shape
            self.held[cells.STRETCH] = machine_code.address("stretch")
            return
        for idx in range(len(cache.layers)):
            self._set_rows(idx, cache.sight(idx), NUMBERS[cache.dtype], cache.rows_at(idx))
        self.as_panels = not layers[:, plan.RING].any()

    def begin(self, opened: Any) -> None:
        """Nothing: all lies where it belongs."""

    def open(self, first: int, n_new: int, rows: Rows) -> None:
        """Tokens [first, first + n_new) of the cache's open step come next; logits are wanted after these ``rows``."""
        segments = self.cache.segments
        if n_new == 1 and len(segments) == 1:
            self._place_one(segments[0].n_past + first, self.cache.slot_of(segments[0].sequence_id))
        else:
            parts, ends = [], []
            for s in segments:
                begin, end = max(first, s.row), min(first + n_new, s.row + s.n_new)
                if begin < end:
                    parts.append((s.n_past + begin - s.row, end - begin, self.cache.slot_of(s.sequence_id)))
                    if end == s.row + s.n_new:
                        ends.append(end - 1 - first)
            self._place(parts, rows, ends)
        if self.in_blocks and self.layers[0, plan.CODED]:
            for window, which in self._by_window.items():
                self.layers[which, plan.ROWS] = self.cache.step_rows(window).ctypes.data + 32 * first

    def close(self, first: int, n_new: int, opened: Any) -> None:
        """The tokens are where they belong."""


class Staging(_Cells):
    """K and V of one sequence, (layers, 2, G, capacity, D) in the cache's dtype."""

    def __init__(self, cache: Any, layers: np.ndarray) -> None:
        super().__init__(layers, as_panels=True)
        self.cache = cache
        self._capacity = 0
        self._store: list[tuple[Tensor, Tensor]] = []

    def _reserve(self, capacity: int) -> None:
        if capacity <= self._capacity:
            return
        cache, self._store = self.cache, []
        self._capacity = capacity = min(-(-capacity // 64) * 64, cache.capacity_tokens)
        for idx, layer in enumerate(cache.layers):
            shapes: Sequence[Any] = [entry.shape for entry in layer.entries]
            k, v = (torch.empty((g, capacity, d), dtype=cache.dtype) for g, d in shapes)
            self._store.append((k, v))
            head_stride = k.stride(0) * k.itemsize
            rows = {"k": k.data_ptr(), "v": v.data_ptr(), "head_stride": head_stride}
            rows |= {"slot_stride": 0, "ring": 0, "ring_sinks": 0}
            self._set_rows(idx, cache.sight(idx), NUMBERS[cache.dtype], rows)

    def begin(self, opened: Any) -> None:
        """Room for all of the open step's tokens, and what the cache has of those before, in their positions' rows."""
        (segment,) = self.cache.segments
        self._reserve(segment.n_total)
        if not segment.n_past:
            return
        past = replace(segment, n_new=0)
        for idx, (k, v) in enumerate(self._store):
            opened.check()
            known_k, known_v, positions = self.cache.dense(idx, past)
            if positions is None:
                k[:, : segment.n_past], v[:, : segment.n_past] = known_k, known_v
            else:  # what is gone weighs nothing, times a number
                k[:, : segment.n_past], v[:, : segment.n_past] = 0, 0
                k[:, positions], v[:, positions] = known_k, known_v

    def open(self, first: int, n_new: int, rows: Rows) -> None:
        """Tokens [first, first + n_new) of the cache's open step come next; logits are wanted after these ``rows``."""
        (segment,) = self.cache.segments
        ends = [n_new - 1] if first + n_new == segment.n_new else []
        self._place([(segment.n_past + first, n_new, 0)], rows, ends)

    def close(self, first: int, n_new: int, opened: Any) -> None:
        """Give the tokens to the cache when the last of them has passed; it may have to round them all first."""
        (segment,) = self.cache.segments
        if first + n_new < segment.n_new:
            return
        for idx, (k, v) in enumerate(self._store):
            opened.check()
            new_k, new_v = (t[:, segment.n_past : segment.n_total].transpose(0, 1) for t in (k, v))
            self.cache.append(idx, k=new_k, v=new_v)
        if self.cache.keeps_history:
            self._store, self._capacity = [], 0
