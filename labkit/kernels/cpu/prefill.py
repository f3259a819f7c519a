# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Many tokens through the whole model in one compiled function: the prompt, a chunk of it, or a draft to verify.

The products are ``matmul.multiply`` (each thread a share of the rows); everything between them is done token by token,
each thread taking every n-th. Keys and values go straight into the cache, and only the last token meets the head.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.cpu import attention_panels, attention_run, blocks, entries, mixture, mixture_run
from labkit.kernels.cpu.cells import (
    APART,
    ASKED,
    CAP_BITS,
    CLOCK,
    D_MODEL,
    EPS_BITS,
    FINAL_B,
    FINAL_W,
    FLOATS,
    GIVE_WAY,
    HELD,
    LASTS,
    LAYER_NORM,
    LAYERS,
    LINEARS,
    LOGITS,
    N_CELLS,
    N_HELD,
    N_LASTS,
    N_LAYERS,
    N_NEW,
    N_PARTS,
    N_PHASES,
    N_SIZES,
    N_THREADS,
    OWN,
    PHASES,
    PIECES,
    SIZES,
    STOPPED,
    T_ATTENTION,
    T_FFN,
    T_KV_CACHE,
    T_LM_HEAD,
    T_NORM,
    TOKENS,
    WANTED,
    WIDEST,
    WORK,
    X,
)
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.matmul import multiply, round_tokens
from labkit.kernels.cpu.memory import BUFFERS, private_bytes, product_bytes
from labkit.kernels.cpu.plan import (
    ACTIVATION,
    ATTN_NORM,
    ATTN_NORM_B,
    ATTN_POST,
    ATTN_POST_B,
    BF16,
    CACHE_FORMAT,
    D_FF,
    D_HEAD,
    DOWN,
    FFN_NORM,
    FFN_NORM_B,
    FFN_POST,
    FFN_POST_B,
    GATE,
    GATED,
    K_NORM,
    LAYER,
    LINEAR,
    N_EXPERTS,
    N_HEADS,
    N_KV,
    N_OUT,
    NORMS,
    PER_LAYER,
    Q_NORM,
    QK_NORM,
    ROUNDS,
    UP,
    K,
    O,
    Q,
    V,
)
from labkit.kernels.cpu.products import share
from labkit.kernels.cpu.rowwise import array_at
from labkit.kernels.cpu.simd import HAS_AVX2, atomic_read, atomic_swap, ticks
from labkit.kernels.cpu.step import barrier, charge


def prefill(rank, team, job):
    """N_NEW tokens: job X holds their embeddings (T, M), which their hidden states after the last layer replace; LOGITS
    receives those after LASTS, (n, V) with V made whole fours.

    The cell ASKED, which the caller may set at any time, is looked at before each layer."""
    cells = carray(array_at(job), (N_CELLS,), np.int64)
    n_threads, give_way_at, clock = cells[N_THREADS], cells[GIVE_WAY], cells[CLOCK]
    sizes = carray(array_at(cells[SIZES]), (N_SIZES,), np.int64)
    as_floats = carray(array_at(cells[SIZES]), (2 * N_SIZES,), np.float32)
    eps, cap = as_floats[2 * EPS_BITS], as_floats[2 * CAP_BITS]
    n_layers, m, n_new = sizes[N_LAYERS], sizes[D_MODEL], sizes[N_NEW]
    n_parts, pieces = sizes[N_PARTS], sizes[PIECES]
    layer_norm = sizes[LAYER_NORM] != 0
    wanted = sizes[WANTED] != 0  # now: after the last barrier the caller may write the next job here
    held = carray(array_at(sizes[HELD]), (N_HELD,), np.int64)
    tokens = carray(array_at(held[TOKENS]), (n_new, 2), np.int64)
    n_lasts = held[N_LASTS]
    lasts = carray(array_at(held[LASTS]), (n_lasts,), np.int64)
    linears = carray(array_at(cells[LINEARS]), (PER_LAYER * n_layers + 1, LINEAR), np.int64)
    layers = carray(array_at(cells[LAYERS]), (n_layers, LAYER), np.int64)
    floats = carray(array_at(cells[FLOATS]), (n_layers, 2), np.float32)
    phases = carray(array_at(cells[PHASES]), (N_PHASES,), np.int64)
    asked, stopped = cells[PHASES] + 8 * ASKED, cells[PHASES] + 8 * STOPPED
    row = 4 * ((sizes[WIDEST] + 255) // 64 * 64)
    whole = row * n_new
    x, x_row = cells[X], 4 * m
    normed, q, k, v = cells[WORK], cells[WORK] + whole, cells[WORK] + 2 * whole, cells[WORK] + 3 * whole
    delta, gate, up = cells[WORK] + 4 * whole, cells[WORK] + 5 * whole, cells[WORK] + 6 * whole
    attended = delta  # free until the FFN's last product
    work = cells[WORK] + BUFFERS * whole
    mine = (work + product_bytes(n_new, sizes[WIDEST], n_threads) + 63) // 64 * 64
    panels = mine + n_threads * private_bytes(sizes[WIDEST], sizes[OWN])
    mine += rank * private_bytes(sizes[WIDEST], sizes[OWN])
    at = ticks(clock)
    for idx in range(n_layers):
        layer, lin = layers[idx], linears[PER_LAYER * idx : PER_LAYER * (idx + 1)]
        d, n_heads, n_kv = layer[D_HEAD], layer[N_HEADS], layer[N_KV]
        for t in range(rank, n_new, n_threads):
            if layer[NORMS] == 1:
                blocks.copy(x + t * x_row, m, normed + t * row)
            else:
                blocks.norm(x + t * x_row, m, layer[ATTN_NORM], layer[ATTN_NORM_B], eps, layer_norm, normed + t * row)
        if rank == 0:  # one thread looks, so that all leave at the same layer
            atomic_swap(stopped, atomic_read(asked))
        barrier(team, n_threads, give_way_at)
        at = charge(rank, phases, T_NORM, clock, at)
        if atomic_read(stopped) != 0:
            wanted = False
            break
        round_tokens(lin[Q], normed, row, n_new, work, rank, n_threads)
        barrier(team, n_threads, give_way_at)
        multiply(lin[Q], normed, row, n_new, q, row, work, rank, n_threads)
        if lin[K, ROUNDS] != lin[Q, ROUNDS]:
            barrier(team, n_threads, give_way_at)
            round_tokens(lin[K], normed, row, n_new, work, rank, n_threads)
            barrier(team, n_threads, give_way_at)
        multiply(lin[K], normed, row, n_new, k, row, work, rank, n_threads)
        if lin[V, ROUNDS] != lin[K, ROUNDS]:
            barrier(team, n_threads, give_way_at)
            round_tokens(lin[V], normed, row, n_new, work, rank, n_threads)
            barrier(team, n_threads, give_way_at)
        multiply(lin[V], normed, row, n_new, v, row, work, rank, n_threads)
        barrier(team, n_threads, give_way_at)
        at = charge(rank, phases, T_ATTENTION, clock, at)
        for t in range(rank, n_new, n_threads):
            position, slot = tokens[t, 0], tokens[t, 1]
            _turn_heads(layer, layer[Q_NORM], q + t * row, n_heads, d, eps, layer_norm, position)
            _turn_heads(layer, layer[K_NORM], k + t * row, n_kv, d, eps, layer_norm, position)
            entries.write(layer, held, k + t * row, v + t * row, position, slot)
        barrier(team, n_threads, give_way_at)
        at = charge(rank, phases, T_KV_CACHE, clock, at)
        if held[APART] != 0:
            entries.attend(rank, n_threads, layer, floats[idx], held, q, row, n_new, n_parts, pieces, mine)
            barrier(team, n_threads, give_way_at)
            for t in range(rank, n_new, n_threads):
                entries.gather(layer, t, n_new, n_parts, pieces, attended + t * row)
        else:
            # Keys that lost more to bf16 than that does are summed up as integers, given an instruction for it.
            past, slot, integers = tokens[0, 0], tokens[0, 1], HAS_AVX2 and layer[CACHE_FORMAT] == BF16
            attention_panels.make(rank, n_threads, layer, past, n_new, slot, integers, mine, panels)
            barrier(team, n_threads, give_way_at)
            attention_run.attend(
                rank, n_threads, layer, floats[idx], q, row, n_new, past, integers, panels, mine, attended, row
            )
        barrier(team, n_threads, give_way_at)
        round_tokens(lin[O], attended, row, n_new, work, rank, n_threads)
        barrier(team, n_threads, give_way_at)
        multiply(lin[O], attended, row, n_new, normed, row, work, rank, n_threads)
        barrier(team, n_threads, give_way_at)
        at = charge(rank, phases, T_ATTENTION, clock, at)
        for t in range(rank, n_new, n_threads):
            here, added = x + t * x_row, normed + t * row
            if layer[NORMS] == 1:
                blocks.norm(added, m, layer[ATTN_NORM], layer[ATTN_NORM_B], eps, layer_norm, added)
            elif layer[NORMS] == 2:
                blocks.norm(added, m, layer[ATTN_POST], layer[ATTN_POST_B], eps, layer_norm, added)
            _add(here, added, m)
            if layer[NORMS] == 1:
                blocks.copy(here, m, added)
            else:
                blocks.norm(here, m, layer[FFN_NORM], layer[FFN_NORM_B], eps, layer_norm, added)
        barrier(team, n_threads, give_way_at)
        at = charge(rank, phases, T_NORM, clock, at)
        if layer[D_FF] != 0:
            first_of_two = GATE if layer[GATED] != 0 else UP
            round_tokens(lin[first_of_two], normed, row, n_new, work, rank, n_threads)
            barrier(team, n_threads, give_way_at)
            if layer[GATED] != 0:
                multiply(lin[GATE], normed, row, n_new, gate, row, work, rank, n_threads)
                if lin[UP, ROUNDS] != lin[GATE, ROUNDS]:
                    barrier(team, n_threads, give_way_at)
                    round_tokens(lin[UP], normed, row, n_new, work, rank, n_threads)
                    barrier(team, n_threads, give_way_at)
            multiply(lin[UP], normed, row, n_new, up, row, work, rank, n_threads)
            barrier(team, n_threads, give_way_at)
            for t in range(rank, n_new, n_threads):
                here = up + t * row
                blocks.activate(layer[ACTIVATION], layer[GATED] != 0, gate + t * row, here, layer[D_FF], here)
            barrier(team, n_threads, give_way_at)
            round_tokens(lin[DOWN], up, row, n_new, work, rank, n_threads)
            barrier(team, n_threads, give_way_at)
            multiply(lin[DOWN], up, row, n_new, delta, row, work, rank, n_threads)
            barrier(team, n_threads, give_way_at)
        if layer[N_EXPERTS] != 0:
            for t in range(rank, n_new, n_threads):
                if layer[D_FF] == 0:
                    blocks.fill(delta + t * row, 0, m, np.float32(0.0))
                else:
                    mixture.weigh_shared(layer, normed + t * row, mine, delta + t * row, 0, m)
            mixture_run.experts(
                layer, normed, row, m, n_new, delta, q, k, v, gate, up, q, work, team, rank,
                n_threads, give_way_at,
            )  # fmt: skip
            barrier(team, n_threads, give_way_at)
        at = charge(rank, phases, T_FFN, clock, at)
        for t in range(rank, n_new, n_threads):
            added = delta + t * row
            if layer[NORMS] == 1:
                blocks.norm(added, m, layer[FFN_NORM], layer[FFN_NORM_B], eps, layer_norm, added)
            elif layer[NORMS] == 2:
                blocks.norm(added, m, layer[FFN_POST], layer[FFN_POST_B], eps, layer_norm, added)
            _add(x + t * x_row, added, m)
        at = charge(rank, phases, T_NORM, clock, at)
    barrier(team, n_threads, give_way_at)
    if wanted:
        head = linears[PER_LAYER * n_layers]
        first, end = share(head[N_OUT], 4, rank, n_threads)
        out_row = 4 * ((head[N_OUT] + 3) // 4 * 4)
        for i in range(rank, n_lasts, n_threads):
            last = x + lasts[i] * x_row
            blocks.norm(last, m, sizes[FINAL_W], sizes[FINAL_B], eps, layer_norm, normed + i * row)
        barrier(team, n_threads, give_way_at)
        round_tokens(head, normed, row, n_lasts, work, rank, n_threads)
        barrier(team, n_threads, give_way_at)
        multiply(head, normed, row, n_lasts, cells[LOGITS], out_row, work, rank, n_threads)
        if cap != 0.0:
            barrier(team, n_threads, give_way_at)
            for i in range(n_lasts):
                out = blocks.floats(cells[LOGITS] + i * out_row, head[N_OUT])
                for j in range(first, end):
                    out[j] = cap * np.float32(np.tanh(out[j] / cap))
        barrier(team, n_threads, give_way_at)
        charge(rank, phases, T_LM_HEAD, clock, at)


@jit
def _turn_heads(layer, norm, heads, n_heads, d, eps, layer_norm, position):
    """Query or key heads of one token: their norm, if the family has one, then rotary."""
    if layer[QK_NORM] == 1:
        for head in range(n_heads):
            blocks.norm(heads + 4 * d * head, d, norm, 0, eps, layer_norm, heads + 4 * d * head)
    elif layer[QK_NORM] == 2:
        blocks.norm(heads, n_heads * d, norm, 0, eps, layer_norm, heads)
    blocks.turn(heads, n_heads, d, layer, position)


@jit
def _add(to, address, n):
    y, x = blocks.floats(to, n), blocks.floats(address, n)
    for i in range(n):
        y[i] += x[i]
