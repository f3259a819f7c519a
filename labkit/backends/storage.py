"""Where a cache's entries lie, as numbers for the compiled step: the last columns of the layers' table, and ``held``.

    InPlace    the compiled step writes and reads the cache's own memory
    Staging    a prompt into a cache of another kind: it attends to its tokens in memory of its own, as they are, and to
               what the cache gives back of those before; the cache stores them when all layers are done

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
from labkit.kernels.cpu import cells, machine_code, plan, stored_spec

NUMBERS = {torch.float32: plan.FP32, torch.bfloat16: plan.BF16}
MOST_TOKENS = 256
"""Tokens of several sequences that go through the model together."""


def why_not(cache: Any) -> str | None:
    """Why the compiled step cannot work on this cache; None when it can, for some steps at least."""
    if cache.dtype not in NUMBERS:
        return f"a {cache.dtype} cache has no compiled step."
    if cache.keeps_history and not cache.in_place_tokens:
        return f"the {cache.kind} cache has no compiled step."
    if hasattr(cache, "kernel_sizes"):
        for layer_idx in range(len(cache.layers)):
            if reason := stored_spec.why_not(**cache.kernel_sizes(layer_idx)):
                return f"{reason}."
    return None


def serves(cache: Any) -> type[InPlace] | type[Staging] | None:
    """What serves the cache's open step; None: the reference."""
    segments = cache.segments
    n_new = sum(segment.n_new for segment in segments)
    if all(segment.n_new <= cache.in_place_tokens for segment in segments) and (
        len(segments) == 1 or n_new <= MOST_TOKENS
    ):
        return InPlace
    return Staging if len(segments) == 1 else None


class _Cells:
    """What every storage tells the compiled step about the open step's tokens."""

    def __init__(self, layers: np.ndarray) -> None:
        self.layers = layers
        """The layers' table, a copy that is this storage's own."""
        self.held = np.zeros(cells.N_HELD, np.int64)
        self.layers_at, self.held_at = layers.ctypes.data, self.held.ctypes.data
        self._one, self._last_of_one = np.zeros((1, 2), np.int64), np.zeros(1, np.int64)
        self._tokens = self._lasts = self._last_of_one

    @property
    def lasts(self) -> np.ndarray:
        """Which of the tokens logits are wanted after."""
        return self._lasts

    def _place(self, tokens: np.ndarray, lasts: np.ndarray, *, apart: bool) -> None:
        """tokens (T, 2): each one's position and slot."""
        held, self._tokens, self._lasts = self.held, tokens, lasts
        held[cells.TOKENS], held[cells.LASTS] = tokens.ctypes.data, lasts.ctypes.data
        held[cells.N_LASTS], held[cells.APART] = len(lasts), apart

    def _place_run(self, first: int, n_new: int, slot: int, rows: Rows, *, apart: bool) -> None:
        """n_new tokens of one sequence from position ``first`` on."""
        if n_new == 1:
            self._one[0, 0], self._one[0, 1] = first, slot
            if self._tokens is not self._one:
                self._place(self._one, self._last_of_one, apart=apart)
            return
        tokens = np.empty((n_new, 2), np.int64)
        tokens[:, 0], tokens[:, 1] = np.arange(first, first + n_new), slot
        self._place(tokens, np.arange(n_new) if rows == "all" else np.array([n_new - 1]), apart=apart)

    def _set_rows(self, idx: int, sight: Any, number: int, rows: dict[str, int]) -> None:
        row = self.layers[idx]
        row[[plan.WINDOW, plan.N_SINKS, plan.CACHE_FORMAT]] = sight.window or 0, sight.n_sinks, number
        row[[plan.K_CACHE, plan.V_CACHE, plan.HEAD_STRIDE, plan.SLOT_STRIDE, plan.RING, plan.RING_SINKS]] = [
            rows[name] for name in ("k", "v", "head_stride", "slot_stride", "ring", "ring_sinks")
        ]


class InPlace(_Cells):
    """The cache's own memory."""

    def __init__(self, cache: Any, layers: np.ndarray) -> None:
        super().__init__(layers)
        self.cache = cache
        self.in_blocks = hasattr(cache, "kernel_sizes")
        if not self.in_blocks:
            for idx in range(len(cache.layers)):
                self._set_rows(idx, cache.sight(idx), NUMBERS[cache.dtype], cache.rows_at(idx))
        self._apart = self.in_blocks or bool(layers[:, plan.RING].any())
        if not self.in_blocks:
            return
        self._specs = [stored_spec.make_spec(**cache.spec(idx)) for idx in range(len(cache.layers))]
        layers[:, plan.SPEC] = [spec.ctypes.data for spec in self._specs]
        windows = [layer.window for layer in cache.layers]
        self._by_window = {w: np.flatnonzero([w == other for other in windows]) for w in set(windows)}
        table = cache.table.numpy()
        self.held[[cells.BLOCK_TABLE, cells.N_TABLES, cells.N_BLOCKS]] = table.ctypes.data, *table.shape
        self.held[cells.STRETCH] = machine_code.address("stretch")

    def begin(self, opened: Any) -> None:
        """Nothing: all lies where it belongs."""

    def open(self, first: int, n_new: int, rows: Rows) -> None:
        """Tokens [first, first + n_new) of the cache's open step come next; logits are wanted after these ``rows``."""
        segments = self.cache.segments
        if len(segments) == 1:
            (segment,) = segments
            slot = self.cache.slot_of(segment.sequence_id)
            self._place_run(segment.n_past + first, n_new, slot, rows, apart=self._apart)
        else:
            places = [(at, self.cache.slot_of(s.sequence_id)) for s in segments for at in range(s.n_past, s.n_total)]
            lasts = np.arange(n_new) if rows == "all" else np.array(self.cache.last_rows(), np.int64)
            self._place(np.array(places, np.int64), lasts, apart=True)
        if self.in_blocks:
            for window, which in self._by_window.items():
                self.layers[which, plan.ROWS] = self.cache.step_rows(window).ctypes.data

    def close(self, first: int, n_new: int, opened: Any) -> None:
        """The tokens are where they belong."""


class Staging(_Cells):
    """K and V of one prompt, (layers, 2, G, capacity, D) in the cache's dtype."""

    def __init__(self, cache: Any, layers: np.ndarray) -> None:
        super().__init__(layers)
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
        self._place_run(self.cache.segments[0].n_past + first, n_new, 0, rows, apart=False)

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
