# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""A whole step in one compiled function, for any number of tokens: one, a prompt's chunk, a batch, a draft to check.

    per layer   norm | Q K V | turn, store | attention | output rows | norm | gate and up | activation | down rows

Every thread of the team runs it from the first norm to its share of the logits; between the parts they wait for each
other ( | ). The products share out rows of weights, the rest tokens. Where tokens are few (ALONE), each thread does the
rest for all of them itself, in memory of its own: repeating it costs less than waiting. What is computed, and in what
order, is the same for any number of tokens and threads. Rank 0 reads the clock between the parts, after the team has
met: waiting for the others' share of a part belongs to that part.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.cpu import (
    attention_few,
    attention_panels,
    attention_run,
    blocks,
    cells,
    entries,
    mixture,
    plan,
    tokens,
)
from labkit.kernels.cpu.barrier import barrier, charge
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.matmul import multiply, round_tokens
from labkit.kernels.cpu.memory import ALONE, BUFFERS, is_split, private_bytes, product_bytes, row_bytes
from labkit.kernels.cpu.products import share
from labkit.kernels.cpu.rowwise import array_at
from labkit.kernels.cpu.simd import atomic_read, atomic_swap, ticks


def step(rank, team, job):
    """N_NEW tokens: job X holds their embeddings (T, M), or TABLE and TOKEN the one token. LOGITS receives those after
    LASTS, (n, V) with V made whole fours, HIDDEN, where it is not 0, the hidden states of all after the last layer.

    More than ALONE tokens can be stopped: the cell ASKED, which the caller may set at any time, is looked at before
    each layer."""
    given = carray(array_at(job), (cells.N_CELLS,), np.int64)
    n_threads, give_way_at, clock = given[cells.N_THREADS], given[cells.GIVE_WAY], given[cells.CLOCK]
    sizes = carray(array_at(given[cells.SIZES]), (cells.N_SIZES,), np.int64)
    as_floats = carray(array_at(given[cells.SIZES]), (2 * cells.N_SIZES,), np.float32)
    eps, cap = as_floats[2 * cells.EPS_BITS], as_floats[2 * cells.CAP_BITS]
    n_layers, m, n_new, widest = sizes[cells.N_LAYERS], sizes[cells.D_MODEL], sizes[cells.N_NEW], sizes[cells.WIDEST]
    n_parts, pieces, layer_norm = sizes[cells.N_PARTS], sizes[cells.PIECES], sizes[cells.LAYER_NORM] != 0
    held = carray(array_at(sizes[cells.HELD]), (cells.N_HELD,), np.int64)
    places = carray(array_at(held[cells.TOKENS]), (n_new, 2), np.int64)
    runs = carray(array_at(held[cells.RUNS]), (held[cells.N_RUNS], 2), np.int64)
    n_lasts, n_few = held[cells.N_LASTS], held[cells.N_FEW]
    lasts = carray(array_at(held[cells.LASTS]), (n_lasts,), np.int64)
    linears = carray(array_at(given[cells.LINEARS]), (plan.PER_LAYER * n_layers + 1, plan.LINEAR), np.int64)
    layers = carray(array_at(given[cells.LAYERS]), (n_layers, plan.LAYER), np.int64)
    floats = carray(array_at(given[cells.FLOATS]), (n_layers, 2), np.float32)
    phases = carray(array_at(given[cells.PHASES]), (cells.N_PHASES,), np.int64)
    asked, stopped = given[cells.PHASES] + 8 * cells.ASKED, given[cells.PHASES] + 8 * cells.STOPPED
    token = given[cells.TOKEN]
    # Memory: rows that the team shares, the products', each thread's own (and the products' of a thread for itself).
    alone = n_new <= ALONE
    row = row_bytes(widest)
    whole = row * n_new
    normed, q, k, v = (
        given[cells.WORK],
        given[cells.WORK] + whole,
        given[cells.WORK] + 2 * whole,
        given[cells.WORK] + 3 * whole,
    )
    delta, gate, up = given[cells.WORK] + 4 * whole, given[cells.WORK] + 5 * whole, given[cells.WORK] + 6 * whole
    work = given[cells.WORK] + BUFFERS * whole
    mine = (work + product_bytes(n_new, widest, n_threads) + 63) // 64 * 64
    panels = mine + n_threads * private_bytes(widest, sizes[cells.OWN], n_threads)
    mine += rank * private_bytes(widest, sizes[cells.OWN], n_threads)
    own_work = mine + 3 * ALONE * row
    own = (own_work + product_bytes(ALONE, widest, n_threads) + 63) // 64 * 64
    attended, hidden = gate, up  # free when they are wanted
    x, x_row = given[cells.X], 4 * m
    first, apart = rank, n_threads  # this thread's tokens of what is done token by token
    if alone:
        x, x_row, normed, hidden = mine, row, mine + ALONE * row, mine + 2 * ALONE * row
        work, first, apart = own_work, 0, 1
    at = ticks(clock)
    if given[cells.TABLE] != 0:
        tokens.look_up(given[cells.TABLE], carray(array_at(token), (1,), np.int64)[0], m, x)
        at = charge(rank, phases, cells.T_EMBED, clock, at)
    elif alone:
        for t in range(n_new):
            blocks.copy(given[cells.X] + 4 * m * t, m, x + t * x_row)
    for idx in range(n_layers):
        layer, lin = layers[idx], linears[plan.PER_LAYER * idx : plan.PER_LAYER * (idx + 1)]
        d, n_heads, n_kv = layer[plan.D_HEAD], layer[plan.N_HEADS], layer[plan.N_KV]
        for t in range(first, n_new, apart):
            if layer[plan.NORMS] == 1:
                blocks.copy(x + t * x_row, m, normed + t * row)
            else:
                blocks.norm(
                    x + t * x_row, m, layer[plan.ATTN_NORM], layer[plan.ATTN_NORM_B], eps, layer_norm, normed + t * row
                )
        if not alone:
            if rank == 0:  # one thread looks, so that all leave at the same layer
                atomic_swap(stopped, atomic_read(asked))
            barrier(team, n_threads, give_way_at)
        at = charge(rank, phases, cells.T_NORM, clock, at)
        if not alone and atomic_read(stopped) != 0:
            n_lasts = 0
            break
        _round(lin[plan.Q], normed, row, n_new, work, alone, team, rank, n_threads, give_way_at)
        multiply(lin[plan.Q], normed, row, n_new, q, row, work, rank, n_threads)
        if lin[plan.K, plan.ROUNDS] != lin[plan.Q, plan.ROUNDS]:
            _meet(alone, team, n_threads, give_way_at)
            _round(lin[plan.K], normed, row, n_new, work, alone, team, rank, n_threads, give_way_at)
        multiply(lin[plan.K], normed, row, n_new, k, row, work, rank, n_threads)
        if lin[plan.V, plan.ROUNDS] != lin[plan.K, plan.ROUNDS]:
            _meet(alone, team, n_threads, give_way_at)
            _round(lin[plan.V], normed, row, n_new, work, alone, team, rank, n_threads, give_way_at)
        multiply(lin[plan.V], normed, row, n_new, v, row, work, rank, n_threads)
        barrier(team, n_threads, give_way_at)
        at = charge(rank, phases, cells.T_ATTENTION, clock, at)
        for i in range(rank, 2 * n_new, n_threads):
            t = i // 2
            position, slot = places[t, 0], places[t, 1]
            if i % 2 == 0:
                _turn_heads(layer, layer[plan.Q_NORM], q + t * row, n_heads, d, eps, layer_norm, position)
            else:
                _turn_heads(layer, layer[plan.K_NORM], k + t * row, n_kv, d, eps, layer_norm, position)
                entries.write(layer, held, k + t * row, v + t * row, position, slot)
        barrier(team, n_threads, give_way_at)
        at = charge(rank, phases, cells.T_KV_CACHE, clock, at)
        for i in range(held[cells.N_RUNS]):
            begin, n_here = runs[i, 0], runs[i, 1]
            past, slot = places[begin, 0], places[begin, 1]
            attention_panels.make(rank, n_threads, layer, held, past, n_here, slot, panels)
            barrier(team, n_threads, give_way_at)
            attention_run.attend(
                rank, n_threads, layer, floats[idx], q + begin * row, row, n_here, past, panels, own,
                attended + begin * row, row,
            )  # fmt: skip
            if i + 1 < held[cells.N_RUNS]:
                barrier(team, n_threads, give_way_at)
        if n_few > 0:
            attention_few.attend(rank, n_threads, layer, floats[idx], held, n_parts, q, row, own, pieces, attended, row)
        barrier(team, n_threads, give_way_at)
        heads = attended
        if is_split(n_few, n_kv, n_parts):
            if alone:
                heads = hidden
                attention_few.gather(0, 1, layer, held, pieces, own, heads, row)
            else:
                attention_few.gather(rank, n_threads, layer, held, pieces, own, heads, row)
                barrier(team, n_threads, give_way_at)
        _round(lin[plan.O], heads, row, n_new, work, alone, team, rank, n_threads, give_way_at)
        multiply(lin[plan.O], heads, row, n_new, delta, row, work, rank, n_threads)
        barrier(team, n_threads, give_way_at)
        at = charge(rank, phases, cells.T_ATTENTION, clock, at)
        for t in range(first, n_new, apart):
            here, added, to = x + t * x_row, delta + t * row, normed + t * row
            if layer[plan.NORMS] == 1:
                blocks.norm(added, m, layer[plan.ATTN_NORM], layer[plan.ATTN_NORM_B], eps, layer_norm, to)
                _add(here, to, m)
            elif layer[plan.NORMS] == 2:
                blocks.norm(added, m, layer[plan.ATTN_POST], layer[plan.ATTN_POST_B], eps, layer_norm, to)
                _add(here, to, m)
            else:
                _add(here, added, m)
            if layer[plan.NORMS] == 1:
                blocks.copy(here, m, to)
            else:
                blocks.norm(here, m, layer[plan.FFN_NORM], layer[plan.FFN_NORM_B], eps, layer_norm, to)
        _meet(alone, team, n_threads, give_way_at)
        at = charge(rank, phases, cells.T_NORM, clock, at)
        if layer[plan.D_FF] != 0:
            if layer[plan.GATED] != 0:
                _round(lin[plan.GATE], normed, row, n_new, work, alone, team, rank, n_threads, give_way_at)
                multiply(lin[plan.GATE], normed, row, n_new, gate, row, work, rank, n_threads)
            if layer[plan.GATED] == 0 or lin[plan.UP, plan.ROUNDS] != lin[plan.GATE, plan.ROUNDS]:
                _meet(alone, team, n_threads, give_way_at)
                _round(lin[plan.UP], normed, row, n_new, work, alone, team, rank, n_threads, give_way_at)
            multiply(lin[plan.UP], normed, row, n_new, up, row, work, rank, n_threads)
            barrier(team, n_threads, give_way_at)
            for t in range(first, n_new, apart):
                here, to = up + t * row, hidden + t * row
                blocks.activate(
                    layer[plan.ACTIVATION], layer[plan.GATED] != 0, gate + t * row, here, layer[plan.D_FF], to
                )
            _meet(alone, team, n_threads, give_way_at)
            _round(lin[plan.DOWN], hidden, row, n_new, work, alone, team, rank, n_threads, give_way_at)
            multiply(lin[plan.DOWN], hidden, row, n_new, delta, row, work, rank, n_threads)
        if layer[plan.N_EXPERTS] != 0:
            barrier(team, n_threads, give_way_at)
            if layer[plan.D_FF] == 0:
                for t in range(rank, n_new, n_threads):
                    blocks.fill(delta + t * row, 0, m, np.float32(0.0))
            else:
                mixture.weigh_shared(layer, normed, row, m, delta, n_new, own, own_work, rank, n_threads)
            mixture.experts(
                layer, normed, row, m, n_new, delta, q, k, v, gate, up, q, work, team, rank, n_threads, give_way_at
            )
        barrier(team, n_threads, give_way_at)
        at = charge(rank, phases, cells.T_FFN, clock, at)
        for t in range(first, n_new, apart):
            here, added, to = x + t * x_row, delta + t * row, normed + t * row
            if layer[plan.NORMS] == 1:
                blocks.norm(added, m, layer[plan.FFN_NORM], layer[plan.FFN_NORM_B], eps, layer_norm, to)
                _add(here, to, m)
            elif layer[plan.NORMS] == 2:
                blocks.norm(added, m, layer[plan.FFN_POST], layer[plan.FFN_POST_B], eps, layer_norm, to)
                _add(here, to, m)
            else:
                _add(here, added, m)
        at = charge(rank, phases, cells.T_NORM, clock, at)
    if alone and given[cells.HIDDEN] != 0 and rank == 0:
        for t in range(n_new):
            blocks.copy(x + t * x_row, m, given[cells.HIDDEN] + 4 * m * t)
    if not alone:
        barrier(team, n_threads, give_way_at)
    if n_lasts > 0:
        head = linears[plan.PER_LAYER * n_layers]
        out_row = 4 * ((head[plan.N_OUT] + 3) // 4 * 4)
        for i in range(first, n_lasts, apart):
            blocks.norm(
                x + lasts[i] * x_row, m, sizes[cells.FINAL_W], sizes[cells.FINAL_B], eps, layer_norm, normed + i * row
            )
        _meet(alone, team, n_threads, give_way_at)
        at = charge(rank, phases, cells.T_NORM, clock, at)
        _round(head, normed, row, n_lasts, work, alone, team, rank, n_threads, give_way_at)
        multiply(head, normed, row, n_lasts, given[cells.LOGITS], out_row, work, rank, n_threads)
        barrier(team, n_threads, give_way_at)
        begin, end = share(head[plan.N_OUT], 4, rank, n_threads)
        if cap != 0.0:
            for i in range(n_lasts):
                out = blocks.floats(given[cells.LOGITS] + i * out_row, head[plan.N_OUT])
                for j in range(begin, end):
                    out[j] = cap * np.float32(np.tanh(out[j] / cap))
        at = charge(rank, phases, cells.T_LM_HEAD, clock, at)
        if token != 0:  # one token, so ``found`` lies where the next thread expects it
            found = own - mine
            tokens.largest(given[cells.LOGITS], begin, end, own)
            barrier(team, n_threads, give_way_at)
            if rank == 0:
                apart = private_bytes(widest, sizes[cells.OWN], n_threads)
                carray(array_at(token), (1,), np.int64)[0] = tokens.choose(mine + found, apart, n_threads)
                charge(rank, phases, cells.T_SAMPLE, clock, at)
    barrier(team, n_threads, give_way_at)


@jit
def _meet(alone, team, n_threads, give_way_at):
    """Wait for what is shared out by tokens; where each thread does it for itself there is nothing to wait for."""
    if not alone:
        barrier(team, n_threads, give_way_at)


@jit
def _round(linear, x, row, n_tokens, work, alone, team, rank, n_threads, give_way_at):
    """What a product needs of its inputs, which are there: rounded, where the weights ask for it."""
    if alone:
        round_tokens(linear, x, row, n_tokens, work, 0, 1)
        return
    round_tokens(linear, x, row, n_tokens, work, rank, n_threads)
    barrier(team, n_threads, give_way_at)


@jit
def _turn_heads(layer, norm, heads, n_heads, d, eps, layer_norm, position):
    """Query or key heads of one token: their norm, if the family has one, then rotary."""
    if layer[plan.QK_NORM] == 1:
        for head in range(n_heads):
            blocks.norm(heads + 4 * d * head, d, norm, 0, eps, layer_norm, heads + 4 * d * head)
    elif layer[plan.QK_NORM] == 2:
        blocks.norm(heads, n_heads * d, norm, 0, eps, layer_norm, heads)
    blocks.turn(heads, n_heads, d, layer, position)


@jit
def _add(to, address, n):
    y, x = blocks.floats(to, n), blocks.floats(address, n)
    for i in range(n):
        y[i] += x[i]
