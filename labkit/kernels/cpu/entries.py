# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""A token's keys and values, wherever this cache keeps them: written, and read by attention, inside a compiled step.

    write       one token's heads to their place
    attend      this thread's share of the attention of all tokens, ``n_parts`` pieces a token
    gather      one token's pieces put together

A layer whose SPEC is 0 keeps rows beside each other (one run of memory a sequence, or a ring): ``attention``. The
others keep blocks behind a table, in whatever form (``stored``). ``held`` is what they share, see ``cells``.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.cpu import attention, stored
from labkit.kernels.cpu import stored_spec as cells
from labkit.kernels.cpu.blocks import copy
from labkit.kernels.cpu.cells import BLOCK_TABLE, N_BLOCKS, N_TABLES, STRETCH, TOKENS
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.memory import cut, workspace_size
from labkit.kernels.cpu.plan import (
    BF16,
    CACHE_FORMAT,
    D_HEAD,
    HEAD_STRIDE,
    K_CACHE,
    N_HEADS,
    N_KV,
    N_SINKS,
    ROWS,
    SCALE,
    SLOT_STRIDE,
    SOFTCAP,
    SPEC,
    V_CACHE,
)
from labkit.kernels.cpu.rowwise import array_at


@jit
def put(of_bf16, head, d_head, to):
    """A head (D,) float32 to an address, as it is or rounded to bf16, to even."""
    if of_bf16:
        y = carray(array_at(to), (d_head,), np.uint16)
        bits = carray(array_at(head), (d_head,), np.uint32)
        for i in range(d_head):
            y[i] = (bits[i] + np.uint32(0x7FFF) + ((bits[i] >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    else:
        copy(head, d_head, to)


@jit
def write(layer, held, k, v, position, slot):
    """One token's key and value heads, (G, D) float32 each at an address, to where the cache keeps them."""
    d, n_kv = layer[D_HEAD], layer[N_KV]
    if layer[SPEC] == 0:
        bf16 = layer[CACHE_FORMAT] == BF16
        at = slot * layer[SLOT_STRIDE] + attention.row_of(layer, position) * d * (2 if bf16 else 4)
        for g in range(n_kv):
            put(bf16, k + 4 * d * g, d, layer[K_CACHE] + at + g * layer[HEAD_STRIDE])
            put(bf16, v + 4 * d * g, d, layer[V_CACHE] + at + g * layer[HEAD_STRIDE])
        return
    spec = carray(array_at(layer[SPEC]), (cells.N_SPEC,), np.int64)
    ring = spec[cells.RECENT_TOKENS]
    if ring != 0:
        row, bf16 = position % ring, spec[cells.RECENT_KIND] == cells.BF16
        k_at = spec[cells.RECENT_K] + slot * spec[cells.RECENT_K_SEQ] + row * spec[cells.RECENT_K_ROW]
        v_at = spec[cells.RECENT_V] + slot * spec[cells.RECENT_V_SEQ] + row * spec[cells.RECENT_V_ROW]
        k_group, v_group = spec[cells.RECENT_K_GROUP], spec[cells.RECENT_V_GROUP]
    else:
        table = carray(array_at(held[BLOCK_TABLE]), (held[N_TABLES], held[N_BLOCKS]), np.int32)
        size = spec[cells.BLOCK]
        block, row, bf16 = np.int64(table[slot, position // size]), position % size, spec[cells.KIND] == cells.BF16
        k_at = spec[cells.K] + block * spec[cells.K_BLOCK] + row * spec[cells.K_ROW]
        v_at = spec[cells.V] + block * spec[cells.V_BLOCK] + row * spec[cells.V_ROW]
        k_group, v_group = spec[cells.K_GROUP], spec[cells.V_GROUP]
    for g in range(n_kv):
        put(bf16, k + 4 * d * g, d, k_at + g * k_group)
        put(bf16, v + 4 * d * g, d, v_at + g * v_group)


@jit
def attend(rank, n_threads, layer, numbers, held, q, q_row, n_tokens, n_parts, pieces, scores):
    """This thread's pieces of the tokens' attention, into ``pieces`` (an address that all threads share).

    q (T, H, D) at an address, rotated, rows ``q_row`` bytes apart. What is cut depends on ``n_parts`` alone, whoever
    takes it: any number of threads gives the same sums."""
    if layer[SPEC] == 0:
        tokens = carray(array_at(held[TOKENS]), (n_tokens, 2), np.int64)
        size = 4 * layer[N_HEADS] * (layer[D_HEAD] + 2)
        for i in range(rank, n_tokens * n_parts, n_threads):
            t, part = i // n_parts, i % n_parts
            n_stored, slot = tokens[t, 0] + 1, tokens[t, 1]
            at = pieces + i * size
            attention.attend(layer, numbers, q + t * q_row, n_stored, slot, part, n_parts, at, scores)
        return
    n_splits, n_passes = cut(layer, n_tokens, n_parts)
    spec = carray(array_at(layer[SPEC]), (cells.N_SPEC,), np.int64)
    tables = carray(array_at(held[BLOCK_TABLE]), (held[N_TABLES], held[N_BLOCKS]), np.int32)
    rows = carray(array_at(layer[ROWS]), (n_tokens, 4), np.int64)
    n_tasks = n_tokens * layer[N_KV] * n_passes * n_splits
    states = carray(array_at(pieces), (n_tasks, workspace_size(spec)), np.float32)
    for task in range(rank, n_tasks, n_threads):
        stored.take(
            task, n_splits, n_passes, held[STRETCH], spec, tables, rows, q, q_row, layer[N_HEADS], layer[N_SINKS],
            numbers[SCALE], numbers[SOFTCAP], states,
        )  # fmt: skip


@jit
def gather(layer, t, n_tokens, n_parts, pieces, out):
    """Token t's pieces to its heads' outputs, (H, D) at an address. All threads' pieces must be there."""
    d, n_heads = layer[D_HEAD], layer[N_HEADS]
    if layer[SPEC] == 0:
        size = 4 * n_heads * (d + 2)
        attention.merge(pieces + t * n_parts * size, size, n_parts, n_heads, d, out)
        return
    n_splits, n_passes = cut(layer, n_tokens, n_parts)
    spec = carray(array_at(layer[SPEC]), (cells.N_SPEC,), np.int64)
    n_tasks = n_tokens * layer[N_KV] * n_passes * n_splits
    states = carray(array_at(pieces), (n_tasks, workspace_size(spec)), np.float32)
    stored.merge(t, n_splits, n_passes, layer[N_KV], n_heads, d, states, out)
