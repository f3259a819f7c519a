# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""A sequence's stored keys and values as panels, made once a layer for all the tokens of a prompt that meet them.

A tile of TILE keys of one group lies together, at ``tile_at``, in float32:

    keys    (8, D, 16)              sixteen keys to a panel, one number of each beside the other
    values  (D' / 16, TILE, 16)     sixteen channels to a panel, one key's after the other's; D' = D made whole sixteens
"""

from __future__ import annotations

import numpy as np

from labkit.kernels.cpu import panels, rowwise
from labkit.kernels.cpu.attention import run_of
from labkit.kernels.cpu.blocks import copy, fill
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.memory import ROWS, TILE, WORD, tile_bytes
from labkit.kernels.cpu.plan import BF16, CACHE_FORMAT, D_HEAD, N_KV, N_SINKS, WINDOW

HALF = 8
"""Keys that are packed at once; wherever a cache has whole panels made, so many lie beside each other."""


@jit
def tile_at(tile, group, n_kv, d):
    """Where a tile lies, in bytes."""
    return (tile * n_kv + group) * tile_bytes(d)


@jit
def unseen(layer, key, n, n_past):
    """Whether none of the keys [key, key + n) is seen by the token at ``n_past``, nor by any after it."""
    window = layer[WINDOW]
    return window != 0 and key + n <= n_past + 1 - window and key >= layer[N_SINKS]


@jit
def make(rank, n_threads, layer, held, n_past, n_tokens, slot, out):
    """This thread's tiles of what the tokens [n_past, n_past + n_tokens) see, to the address ``out``."""
    d, n_kv, bf16 = layer[D_HEAD], layer[N_KV], layer[CACHE_FORMAT] == BF16
    n_keys = n_past + n_tokens
    for piece in range(rank, -(-n_keys // TILE) * n_kv, n_threads):
        tile, group = piece // n_kv, piece % n_kv
        key = tile * TILE
        n = min(TILE, n_keys - key)
        if unseen(layer, key, n, n_past):
            continue
        keys = out + tile_at(tile, group, n_kv, d)
        values = keys + 4 * TILE * d
        for at in range(0, n, HALF):
            k, v, k_row, v_row, _ = run_of(layer, held, slot, group, key + at)
            half = at // HALF % 2
            first = at - half * HALF
            if bf16:
                panels.pack_bf16(k - half * HALF * k_row, k_row, n - 1 - first, d, half, keys + 4 * d * first)
            else:
                panels.pack_fp32(k - half * HALF * k_row, k_row, n - 1 - first, d, half, keys + 4 * d * first)
            for i in range(min(HALF, n - at)):
                _value(bf16, v + i * v_row, d, values + WORD * (at + i))


@jit
def _value(bf16, v, d, out):
    """One key's value to its place in each panel."""
    for channel in range(0, d, ROWS):
        to, n = out + 4 * TILE * channel, min(ROWS, d - channel)
        if bf16:
            rowwise.widen_bf16(v + 2 * channel, n, to)
        else:
            copy(v + 4 * channel, n, to)
        fill(to, n, ROWS, np.float32(0.0))
