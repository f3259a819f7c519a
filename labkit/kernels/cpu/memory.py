"""How much working memory the compiled functions need, in Python and, through ``jit``, in compiled code: plain numbers.

A thread's own memory, what threads share, and the pieces of attention; tiles and panels of 16 (``ROWS``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.kernels.cpu import stored_spec as spec_cells
from labkit.kernels.cpu.plan import CODED, D_HEAD, N_HEADS, N_KV, SPEC

ROWS = 16
"""Rows, keys or channels of a panel: two vectors of 8 lanes."""
WORD = 64
"""Bytes of a panel's word: four of each row."""
TILE = 128
"""Keys that attention takes together; the borders are multiples of it."""
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
"""Rows of a token that a step keeps, of the widest matrix."""
ALONE = 4
"""Up to so many tokens each thread does for itself what is done token by token."""
PANEL_TOKENS = 12
"""From so many tokens of one sequence on, the keys that they meet are made panels first."""
CODED_TILE = 256
"""As TILE, where keys are codes: whole blocks of any size."""


def row_bytes(widest):
    """A row of a token."""
    return 4 * ((widest + 255) // 64 * 64)


def whole(d):
    """A head's width in whole panels."""
    return (d + ROWS - 1) // ROWS * ROWS


def tile_bytes(d):
    """A tile of one group's keys and values as panels."""
    return 4 * TILE * (d + whole(d))


def all_bytes(n_keys, n_kv, d):
    """A layer's tiles."""
    return -(-n_keys // TILE) * n_kv * tile_bytes(d)


def run_floats(d, n_shared):
    """A thread in a prompt's attention, float32, where ``n_shared`` query heads share a key head: queries and states
    of an item's rows; a band's scores and pieces."""
    n_rows = max(MOST_ROWS, n_shared) + STEP
    return n_rows * (2 * whole(d) + 2) + (TILE + whole(d) + 2) * BAND + 64


def few_floats(d, n_shared):
    """A thread in a few tokens' attention: queries, states and pieces of a group's heads."""
    return (n_shared * (3 * d + 4) + 79) // 16 * 16


def score_floats(n_shared):
    """Scores of a tile, and what is written behind them."""
    return n_shared * (TILE + 16)


def tile_tokens(layer):
    """Keys to a tile of a few tokens' attention."""
    return CODED_TILE if layer[CODED] != 0 else TILE


def is_split(n_few, n_kv, n_parts):
    """Whether a few tokens' attention is shared out by tiles too, because there are too few tokens and groups. It
    depends on the team's size, not on who takes part: there is memory for the pieces."""
    return n_parts > 1 and 0 < n_few * n_kv < 4 * n_parts


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


def private_bytes(widest, floats, n_threads):
    """A thread's own: rows of ALONE tokens, its products with them, and ``floats`` for attention."""
    rows = 3 * ALONE * row_bytes(widest) + product_bytes(ALONE, widest, n_threads)
    return (rows + 4 * floats + 255) // 64 * 64


def step_bytes(n_tokens, widest, floats, panels, n_threads):
    """All of a step; ``panels`` is what keys and values take as such, in bytes."""
    shared = BUFFERS * row_bytes(widest) * n_tokens + product_bytes(n_tokens, widest, n_threads)
    return shared + n_threads * private_bytes(widest, floats, n_threads) + panels + 512


def workspace_size(spec):
    """One task of attention over blocks, float32: m, total, acc, scores, shifts, scaled queries, weights by grid,
    queries."""
    tile = max(STORED_TILE, spec[spec_cells.BLOCK])
    rows = spec_cells.MAX_ROWS
    return rows * (3 + spec[spec_cells.DIMS_V] + 2 * spec[spec_cells.DIMS_K] + tile * (1 + spec[spec_cells.V_GRIDS]))


IN_COMPILED_CODE = (
    row_bytes, whole, tile_bytes, all_bytes, few_floats, record_bytes, own_bytes, product_bytes, private_bytes,
    workspace_size,
    tile_tokens, is_split,
)  # fmt: skip


def own_floats(layers: np.ndarray) -> int:
    """float32 numbers of a thread's own memory for attention, in the layer that needs most."""
    most = 0
    for layer in layers:
        d, n_shared = int(layer[D_HEAD]), int(layer[N_HEADS] // layer[N_KV])
        reading = score_floats(n_shared)
        if layer[CODED]:
            integers: Any = np.ctypeslib.ctypes.c_int64 * spec_cells.N_SPEC
            spec = np.ctypeslib.as_array(integers.from_address(int(layer[SPEC])))
            reading = int(workspace_size(spec))
        most = max(most, run_floats(d, n_shared), few_floats(d, n_shared) + reading)
    return most


def panel_bytes(layers: np.ndarray, n_keys: int) -> int:
    """Memory of a run's keys and values as panels, in the layer that needs most."""
    return max(int(all_bytes(n_keys, n_kv, d)) for n_kv, d in layers[:, [N_KV, D_HEAD]].tolist())


def piece_floats(layers: np.ndarray, n_few: int, n_tiles: int, n_parts: int) -> int:
    """float32 numbers that the pieces of a few tokens' attention take, the most of any layer."""
    sizes = layers[:, [N_HEADS, N_KV, D_HEAD]].tolist()
    return max((n_few * n * n_tiles * (d + 2) for n, n_kv, d in sizes if is_split(n_few, n_kv, n_parts)), default=0)
