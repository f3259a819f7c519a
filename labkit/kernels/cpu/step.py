# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""A whole decode step in one compiled function: every thread of the team runs it from the first norm to its share of
the logits, and waits for the others only where a product needs all of the product before.

    per layer   norm, Q K V rows | rotary, append, attention over a share of the keys | merge, output rows |
                norm, gate and up rows, activation | down rows |                          ( | is a barrier )

The residual stream, the norms and the merge are each thread's own: repeating them costs less than waiting.
Rank 0 reads the clock between the parts and leaves nanoseconds by phase.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.cpu import blocks, entries, mixture, tokens
from labkit.kernels.cpu.cells import (
    ARRIVED,
    CAP_BITS,
    CLOCK,
    D_MODEL,
    EPS_BITS,
    FINAL_B,
    FINAL_W,
    FLOATS,
    GENERATION,
    GIVE_WAY,
    HELD,
    HIDDEN,
    LAYER_NORM,
    LAYERS,
    LINEARS,
    LOGITS,
    MIXTURE,
    N_CELLS,
    N_HELD,
    N_LAYERS,
    N_PARTS,
    N_PHASES,
    N_SIZES,
    N_THREADS,
    PHASES,
    PIECES,
    SIZES,
    T_ATTENTION,
    T_EMBED,
    T_FFN,
    T_KV_CACHE,
    T_LM_HEAD,
    T_NORM,
    T_SAMPLE,
    TABLE,
    TOKEN,
    TOKENS,
    WIDEST,
    WORK,
    X,
)
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.memory import ROWS, TILE, room
from labkit.kernels.cpu.plan import (
    ACTIVATION,
    ATTN_NORM,
    ATTN_NORM_B,
    ATTN_POST,
    ATTN_POST_B,
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
    N_ACTIVE,
    N_EXPERTS,
    N_HEADS,
    N_KV,
    N_OUT,
    NORMS,
    PER_LAYER,
    Q_NORM,
    QK_NORM,
    ROUNDS,
    SPEC,
    UP,
    K,
    O,
    Q,
    V,
)
from labkit.kernels.cpu.products import prepare, product, share
from labkit.kernels.cpu.rowwise import array_at
from labkit.kernels.cpu.simd import atomic_add, atomic_read, atomic_swap, give_way, pause, ticks

SPINS = 2000
"""Looks at a flag before the core is offered to another thread."""


@jit
def barrier(team, n_threads, give_way_at):
    """Wait until all of the team's threads are here."""
    if n_threads == 1:
        return
    generation = atomic_read(team + 8 * GENERATION)
    if atomic_add(team + 8 * ARRIVED, 1) == n_threads - 1:
        atomic_swap(team + 8 * ARRIVED, 0)
        atomic_add(team + 8 * GENERATION, 1)
        return
    spins = 0
    while atomic_read(team + 8 * GENERATION) == generation:
        spins += 1
        if spins < SPINS:
            pause()
        else:
            give_way(give_way_at)


def decode(rank, team, job):
    """One token: job X holds its embedding (M,), or TABLE and TOKEN the token; LOGITS receives (V,). Every thread
    of the team calls it."""
    cells = carray(array_at(job), (N_CELLS,), np.int64)
    n_threads, give_way_at, clock = cells[N_THREADS], cells[GIVE_WAY], cells[CLOCK]
    sizes = carray(array_at(cells[SIZES]), (N_SIZES,), np.int64)
    numbers_of_step = carray(array_at(cells[SIZES]), (2 * N_SIZES,), np.float32)
    eps, cap = numbers_of_step[2 * EPS_BITS], numbers_of_step[2 * CAP_BITS]
    n_layers, m, n_parts, pieces = sizes[N_LAYERS], sizes[D_MODEL], sizes[N_PARTS], sizes[PIECES]
    layer_norm = sizes[LAYER_NORM] != 0
    held = carray(array_at(sizes[HELD]), (N_HELD,), np.int64)
    place = carray(array_at(held[TOKENS]), (1, 2), np.int64)
    position, slot = place[0, 0], place[0, 1]
    linears = carray(array_at(cells[LINEARS]), (PER_LAYER * n_layers + 1, LINEAR), np.int64)
    layers = carray(array_at(cells[LAYERS]), (n_layers, LAYER), np.int64)
    floats = carray(array_at(cells[FLOATS]), (n_layers, 2), np.float32)
    phases = carray(array_at(cells[PHASES]), (N_PHASES,), np.int64)
    shared_cells, private_cells, _ = room(sizes[WIDEST], n_threads)
    padded = (sizes[WIDEST] + 255) // 64 * 64
    wide = 4 * padded
    work = cells[WORK]
    q_new, k_new, v_new, delta, gate, up = (
        work,
        work + wide,
        work + 2 * wide,
        work + 3 * wide,
        work + 4 * wide,
        work + 5 * wide,
    )
    hidden, delta_ffn = work + 6 * wide, work + 7 * wide
    mine = work + 4 * (shared_cells + rank * private_cells)
    x, normed, q, k, attended = mine, mine + wide, mine + 2 * wide, mine + 3 * wide, mine + 4 * wide
    scores, scratch = mine + 5 * wide, mine + 5 * wide + 4 * TILE  # rounded activations, and a product's own memory
    token = cells[TOKEN]
    at = ticks(clock)
    if cells[TABLE] != 0:
        tokens.look_up(cells[TABLE], carray(array_at(token), (1,), np.int64)[0], m, x)
        at = charge(rank, phases, T_EMBED, clock, at)
    else:
        blocks.copy(cells[X], m, x)
    stream = blocks.floats(x, m)
    for idx in range(n_layers):
        layer, lin = layers[idx], linears[PER_LAYER * idx : PER_LAYER * (idx + 1)]
        d, n_heads, n_kv = layer[D_HEAD], layer[N_HEADS], layer[N_KV]
        # norm -> Q, K, V
        if layer[NORMS] == 1:
            blocks.copy(x, m, normed)
        else:
            blocks.norm(x, m, layer[ATTN_NORM], layer[ATTN_NORM_B], eps, layer_norm, normed)
        at = charge(rank, phases, T_NORM, clock, at)
        for i in (Q, K, V):
            first, end = share(lin[i, N_OUT], ROWS, rank, n_threads)
            if i == Q or lin[i, ROUNDS] != lin[i - 1, ROUNDS]:
                prepare(lin[i], normed, scratch)
            product(lin[i], normed, scratch, q_new if i == Q else (k_new if i == K else v_new), first, end)
        barrier(team, n_threads, give_way_at)
        # rotary, append, attention over a share of the keys
        blocks.copy(q_new, n_heads * d, q)
        if layer[QK_NORM] == 1:
            for head in range(n_heads):
                blocks.norm(q + 4 * d * head, d, layer[Q_NORM], 0, eps, layer_norm, q + 4 * d * head)
        elif layer[QK_NORM] == 2:
            blocks.norm(q, n_heads * d, layer[Q_NORM], 0, eps, layer_norm, q)
        blocks.turn(q, n_heads, d, layer, position)
        if (
            rank == (n_parts - 1) % n_threads
        ):  # the last of a run's keys are this thread's: nobody else reads the new one
            blocks.copy(k_new, n_kv * d, k)
            if layer[QK_NORM] == 1:
                for head in range(n_kv):
                    blocks.norm(k + 4 * d * head, d, layer[K_NORM], 0, eps, layer_norm, k + 4 * d * head)
            elif layer[QK_NORM] == 2:
                blocks.norm(k, n_kv * d, layer[K_NORM], 0, eps, layer_norm, k)
            blocks.turn(k, n_kv, d, layer, position)
            at = charge(rank, phases, T_ATTENTION, clock, at)
            entries.write(layer, held, k, v_new, position, slot)
            at = charge(rank, phases, T_KV_CACHE, clock, at)
        if layer[SPEC] != 0:
            barrier(team, n_threads, give_way_at)
        entries.attend(rank, n_threads, layer, floats[idx], held, q, 0, 1, n_parts, pieces, scores)
        barrier(team, n_threads, give_way_at)
        # merge -> output projection
        entries.gather(layer, 0, 1, n_parts, pieces, attended)
        first, end = share(m, ROWS, rank, n_threads)
        prepare(lin[O], attended, scratch)
        product(lin[O], attended, scratch, delta, first, end)
        barrier(team, n_threads, give_way_at)
        at = charge(rank, phases, T_ATTENTION, clock, at)
        if layer[NORMS] == 1:
            blocks.norm(delta, m, layer[ATTN_NORM], layer[ATTN_NORM_B], eps, layer_norm, normed)
            add(stream, normed, m)
            blocks.copy(x, m, normed)
        else:
            if layer[NORMS] == 2:
                blocks.norm(delta, m, layer[ATTN_POST], layer[ATTN_POST_B], eps, layer_norm, normed)
                add(stream, normed, m)
            else:
                add(stream, delta, m)
            blocks.norm(x, m, layer[FFN_NORM], layer[FFN_NORM_B], eps, layer_norm, normed)
        at = charge(rank, phases, T_NORM, clock, at)
        # FFN
        mixed = layer[N_EXPERTS] != 0
        if mixed:
            mixture.route(layer, normed, sizes[MIXTURE], rank, n_threads)
        if layer[D_FF] != 0:
            first, end = share(layer[D_FF], ROWS, rank, n_threads)
            prepare(lin[GATE if layer[GATED] != 0 else UP], normed, scratch)
            if layer[GATED] != 0:
                product(lin[GATE], normed, scratch, gate, first, end)
                if lin[GATE, ROUNDS] != lin[UP, ROUNDS]:
                    prepare(lin[UP], normed, scratch)
            product(lin[UP], normed, scratch, up, first, end)
            blocks.activate(
                layer[ACTIVATION], layer[GATED] != 0, gate + 4 * first, up + 4 * first, end - first, hidden + 4 * first
            )
        barrier(team, n_threads, give_way_at)
        visits, gates = k, k + 8 * layer[N_ACTIVE]  # free until the next layer's keys
        if mixed:
            mixture.hidden(layer, normed, sizes[MIXTURE], visits, gates, scratch, rank, n_threads)
            barrier(team, n_threads, give_way_at)
        first, end = share(m, ROWS, rank, n_threads)
        if layer[D_FF] != 0:
            prepare(lin[DOWN], hidden, scratch)
            product(lin[DOWN], hidden, scratch, delta_ffn, first, end)
        else:
            blocks.fill(delta_ffn, first, end, np.float32(0.0))
        if mixed:
            mixture.weigh_shared(layer, normed, scratch, delta_ffn, first, end)
            mixture.add(layer, sizes[MIXTURE], visits, gates, scratch, delta_ffn, first, end)
        barrier(team, n_threads, give_way_at)
        at = charge(rank, phases, T_FFN, clock, at)
        if layer[NORMS] == 0:
            add(stream, delta_ffn, m)
        else:
            weight = layer[FFN_NORM] if layer[NORMS] == 1 else layer[FFN_POST]
            bias = layer[FFN_NORM_B] if layer[NORMS] == 1 else layer[FFN_POST_B]
            blocks.norm(delta_ffn, m, weight, bias, eps, layer_norm, normed)
            add(stream, normed, m)
            at = charge(rank, phases, T_NORM, clock, at)
    if rank == 0 and cells[HIDDEN] != 0:
        blocks.copy(x, m, cells[HIDDEN])
    blocks.norm(x, m, sizes[FINAL_W], sizes[FINAL_B], eps, layer_norm, normed)
    at = charge(rank, phases, T_NORM, clock, at)
    head = linears[PER_LAYER * n_layers]
    first, end = share(head[N_OUT], ROWS, rank, n_threads)
    prepare(head, normed, scratch)
    product(head, normed, scratch, cells[LOGITS], first, end)
    if cap != 0.0:
        out = blocks.floats(cells[LOGITS], head[N_OUT])
        for i in range(first, end):
            out[i] = cap * np.float32(np.tanh(out[i] / cap))
    at = charge(rank, phases, T_LM_HEAD, clock, at)
    if token != 0:
        tokens.largest(cells[LOGITS], first, end, scores)
    barrier(team, n_threads, give_way_at)
    if token == 0:
        charge(rank, phases, T_LM_HEAD, clock, at)
    elif rank == 0:
        carray(array_at(token), (1,), np.int64)[0] = tokens.choose(scores, 4 * private_cells, n_threads)
        charge(rank, phases, T_SAMPLE, clock, at)


@jit
def add(stream, address, m):
    delta = blocks.floats(address, m)
    for i in range(m):
        stream[i] += delta[i]


@jit
def charge(rank, phases, phase, clock, since):
    """Rank 0 adds the time since ``since`` to a phase; returns now."""
    if rank != 0:
        return since
    now = ticks(clock)
    phases[phase] += now - since
    return now
