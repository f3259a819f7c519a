"""How much working memory the compiled functions need, in Python and, through ``jit``, in compiled code: plain numbers.

A thread's own memory, what threads share, and the pieces of attention; tiles and panels of 16 (``ROWS``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.kernels.cpu import stored_spec as spec_cells
from labkit.kernels.cpu.plan import D_HEAD, N_HEADS, N_KV, SPEC

ROWS = 16
"""Rows, keys or channels of a panel: two vectors of 8 lanes."""
WORD = 64
"""Bytes of a panel's word: four of each row."""
TILE = 128
"""Keys that a prompt's attention meets at once, or whose scores are held at once."""
STORED_TILE = 64
"""The same of a cache that is read as it is stored."""
PANEL_BYTES = 18 * 1024
"""What a panel takes at most; the tokens' numbers that pass it lie in the first-level cache beside it."""
FEW_INPUTS = 2048
"""Inputs of a panel that a few tokens pass as it comes from memory, before the next ones: scales take 8 bytes each."""
MOST_ROWS = 96
"""Rows of an item of a prompt's attention (one token's heads may be more)."""
STEP = 6
"""Rows that a register tile takes: items are padded to whole tiles."""
BAND = 24
"""Rows that pass a panel one after the other, as it lies in the first-level cache."""
BUFFERS = 7
"""Rows of a token that a prompt's step keeps, of the widest matrix."""


def room(widest, n_threads):
    """Float32 cells of a token's step: (offset of private parts, size of one, all)."""
    padded = (widest + 255) // 64 * 64
    shared = 8 * padded
    private = 7 * padded + TILE + own_bytes(1) // 4 // 16 * 16 + 16
    return shared, private, shared + n_threads * private


def whole(d):
    """A head's width in whole panels."""
    return (d + ROWS - 1) // ROWS * ROWS


def tile_bytes(d):
    """A tile of one group's keys and values, in float32; in int16 it takes half, and the steps."""
    return 4 * TILE * (d + whole(d))


def all_bytes(n_keys, n_kv, d):
    """A layer's tiles."""
    return -(-n_keys // TILE) * n_kv * tile_bytes(d)


def panel_floats(d):
    """A thread that makes tiles: sixteen keys, rounded, and two of them or of the values, widened; float32."""
    return (ROWS + 2) * whole(d) + 64


def own_floats(d, n_shared):
    """A thread in a prompt's attention, float32, where ``n_shared`` query heads share a key head: queries with their
    steps, outputs, maxima and sums of an item's rows; one register tile's scores and weights; one token's queries."""
    n_rows = max(MOST_ROWS, n_shared) + STEP
    mine = n_rows * (2 * whole(d) + 3) + (2 * TILE + 1) * BAND + 2 * ROWS + 64
    return max(mine, panel_floats(d))


def record_bytes(n_in):
    """A rounded token: 16 bits an input, a step a block of 64, a sum for each 16 inputs at most."""
    padded = (n_in + 63) // 64 * 64
    return (2 * padded + padded // 16 + padded // 4 + 63) // 64 * 64


def own_bytes(n_tokens):
    """A thread in a product: a panel, its scales and minima, the last panel's output."""
    return PANEL_BYTES + 8 * FEW_INPUTS + WORD * n_tokens + 256


def product_bytes(n_tokens, widest, n_threads):
    """Products: rounded tokens, and each thread's own."""
    return n_tokens * record_bytes(widest) + 64 + n_threads * own_bytes(n_tokens) + 256


def private_bytes(widest, floats):
    """A thread in a prompt's step: ``floats`` for attention, and what a product with one token needs."""
    return 4 * ((floats + 127) // 64 * 64) + 12 * ((widest + 255) // 64 * 64)


def step_bytes(n_tokens, widest, floats, panels, n_threads):
    """All of a prompt's step; ``panels`` is what keys and values take as such, in bytes."""
    row = 4 * ((widest + 255) // 64 * 64)
    shared = BUFFERS * row * n_tokens + product_bytes(n_tokens, widest, n_threads)
    return shared + n_threads * private_bytes(widest, floats) + panels + 512


def mixture_floats(n_experts, n_active, d_expert):
    """One token's scores, and the hidden layers of the experts it visits; float32."""
    return (n_experts + 63) // 64 * 64 + n_active * ((d_expert + 63) // 64 * 64)


def workspace_size(spec):
    """One task of attention over blocks, float32: m, total, acc, scores, shifts, scaled queries, weights by grid,
    queries."""
    tile = max(STORED_TILE, spec[spec_cells.BLOCK])
    rows = spec_cells.MAX_ROWS
    return rows * (3 + spec[spec_cells.DIMS_V] + 2 * spec[spec_cells.DIMS_K] + tile * (1 + spec[spec_cells.V_GRIDS]))


def cut(layer, n_tokens, n_parts):
    """How the tokens' attention over blocks is cut: (stretches of keys, passes over a group's heads)."""
    n_passes = -(-(layer[N_HEADS] // layer[N_KV]) // spec_cells.MAX_ROWS)
    return max(1, -(-2 * n_parts // (n_tokens * layer[N_KV] * n_passes))) if n_parts > 1 else 1, n_passes


IN_COMPILED_CODE = (
    room, whole, tile_bytes, all_bytes, panel_floats, own_floats, record_bytes, own_bytes, product_bytes, private_bytes,
    workspace_size, cut,
)  # fmt: skip


def piece_floats(layers: np.ndarray, n_tokens: int, n_parts: int) -> int:
    """float32 numbers that the pieces of ``n_tokens`` tokens' attention take, the most of any of ``layers``."""
    most = 0
    for layer in layers:
        if layer[SPEC] == 0:
            n = n_tokens * n_parts * int(layer[N_HEADS] * (layer[D_HEAD] + 2))
        else:
            integers: Any = np.ctypeslib.ctypes.c_int64 * spec_cells.N_SPEC
            spec = np.ctypeslib.as_array(integers.from_address(int(layer[SPEC])))
            n_splits, n_passes = cut(layer, n_tokens, n_parts)
            n = n_tokens * int(layer[N_KV]) * n_passes * n_splits * int(workspace_size(spec))
        most = max(most, n)
    return most
