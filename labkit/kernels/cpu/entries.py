# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""A token's keys and values on their way to where the cache keeps them."""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.cpu import stored_spec as cells
from labkit.kernels.cpu.attention import run_of
from labkit.kernels.cpu.blocks import copy
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.plan import BF16, CACHE_FORMAT, CODED, D_HEAD, N_KV, SPEC
from labkit.kernels.cpu.rowwise import array_at


@jit
def write(layer, held, k, v, position, slot):
    """One token's key and value heads, (G, D) float32 each at an address, to their rows."""
    d = layer[D_HEAD]
    for g in range(layer[N_KV]):
        if layer[CODED] != 0:
            k_at, v_at, bf16 = _recent(layer, slot, g, position)
        else:
            k_at, v_at, _, _, _ = run_of(layer, held, slot, g, position)
            bf16 = layer[CACHE_FORMAT] == BF16
        _put(bf16, k + 4 * d * g, d, k_at)
        _put(bf16, v + 4 * d * g, d, v_at)


@jit
def _recent(layer, slot, group, position):
    """The row in the ring of full-precision rows before codes."""
    spec = carray(array_at(layer[SPEC]), (cells.N_SPEC,), np.int64)
    row = position % spec[cells.RECENT_TOKENS]
    k = spec[cells.RECENT_K] + slot * spec[cells.RECENT_K_SEQ] + row * spec[cells.RECENT_K_ROW]
    v = spec[cells.RECENT_V] + slot * spec[cells.RECENT_V_SEQ] + row * spec[cells.RECENT_V_ROW]
    k += group * spec[cells.RECENT_K_GROUP]
    v += group * spec[cells.RECENT_V_GROUP]
    return k, v, spec[cells.RECENT_KIND] == cells.BF16


@jit
def _put(of_bf16, head, d_head, to):
    """A head (D,) float32 to an address, as it is or rounded to bf16, to even."""
    if of_bf16:
        y = carray(array_at(to), (d_head,), np.uint16)
        bits = carray(array_at(head), (d_head,), np.uint32)
        for i in range(d_head):
            y[i] = (bits[i] + np.uint32(0x7FFF) + ((bits[i] >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    else:
        copy(head, d_head, to)
