# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Attention of a few tokens over a cache's rows as they lie: a token, a batch of sequences' tokens, a draft.

    attend    this thread's share: of (token, group of heads), or, where those are few, of their tiles too
    gather    where tiles were shared out: their pieces put together, in order

Codes (int8, int4) are read by ``stretch``, in tiles of CODED_TILE; the rest is the same.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.cpu import rowwise, scores, stored
from labkit.kernels.cpu.attention import absorb, clear, finish, run_of, soften, span
from labkit.kernels.cpu.blocks import fill, floats
from labkit.kernels.cpu.cells import FEW, N_FEW, N_TILES, TOKENS
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.memory import TILE, few_floats, is_split, tile_tokens
from labkit.kernels.cpu.plan import BF16, CACHE_FORMAT, CODED, D_HEAD, N_HEADS, N_KV, SCALE, SOFTCAP
from labkit.kernels.cpu.rowwise import array_at


@jit
def attend(rank, n_threads, layer, numbers, held, n_parts, q, q_row, own, pieces, out, out_row):
    """q and out (T, H, D), rows apart, float32, at addresses, q rotated; own: ``few_floats`` numbers and what
    ``stretch`` needs; pieces: of all threads."""
    d, n_heads, n_kv, n_few = layer[D_HEAD], layer[N_HEADS], layer[N_KV], held[N_FEW]
    n_shared, size = n_heads // n_kv, 4 * (d + 2)
    split, n_tiles = is_split(n_few, n_kv, n_parts), held[N_TILES]
    n_each = n_tiles if split else 1
    which = carray(array_at(held[FEW]), (n_few,), np.int64)
    states = own + 4 * n_shared * d
    piece = states + n_shared * size
    scratch = own + 4 * few_floats(d, n_shared)
    for task in range(rank, n_few * n_kv * n_each, n_threads):
        i, group = task // (n_kv * n_each), task // n_each % n_kv
        t = which[i]
        position = carray(array_at(held[TOKENS] + 16 * t), (1,), np.int64)[0]
        head = group * n_shared
        _scale(q + t * q_row + 4 * d * head, n_shared * d, numbers[SCALE], own)
        if split:
            tile = task % n_each
            to = pieces + ((i * n_heads + head) * n_tiles + tile) * size
            _tile(layer, numbers, held, t, group, tile, own, scratch, to, n_tiles * size)
            continue
        for h in range(n_shared):
            clear(states + h * size, d)
        for tile in range(position // tile_tokens(layer) + 1):
            if _tile(layer, numbers, held, t, group, tile, own, scratch, piece, size):
                for h in range(n_shared):
                    absorb(states + h * size, piece + h * size, d)
        for h in range(n_shared):
            finish(states + h * size, d, d, out + t * out_row + 4 * d * (head + h))


@jit
def gather(first, apart, layer, held, pieces, own, out, out_row):
    """The heads first, first + apart ... of all tokens: pieces to outputs. All threads' pieces must be there."""
    d, n_heads, n_tiles = layer[D_HEAD], layer[N_HEADS], held[N_TILES]
    size = 4 * (d + 2)
    which = carray(array_at(held[FEW]), (held[N_FEW],), np.int64)
    for i in range(first, held[N_FEW] * n_heads, apart):
        t = which[i // n_heads]
        position = carray(array_at(held[TOKENS] + 16 * t), (1,), np.int64)[0]
        clear(own, d)
        for tile in range(position // tile_tokens(layer) + 1):
            if _is_seen(layer, position, tile):
                absorb(own, pieces + (i * n_tiles + tile) * size, d)
        finish(own, d, d, out + t * out_row + 4 * d * (i % n_heads))


@jit
def _is_seen(layer, position, tile):
    size = tile_tokens(layer)
    sinks, begin, end = span(layer, position, tile * size, size)
    return sinks > 0 or begin < end


@jit
def _scale(x, n, scale, to):
    given, y = floats(x, n), floats(to, n)
    for i in range(n):
        y[i] = given[i] * scale


@jit
def _tile(layer, numbers, held, t, group, tile, queries, scratch, piece, piece_stride):
    """One token's pieces of a tile, for the query heads of a group; whether it sees any of it."""
    place = carray(array_at(held[TOKENS] + 16 * t), (2,), np.int64)
    position, slot = place[0], place[1]
    if not _is_seen(layer, position, tile):
        return False
    d, n_shared = layer[D_HEAD], layer[N_HEADS] // layer[N_KV]
    if layer[CODED] != 0:
        stored.tile(layer, numbers, held, t, group, tile, queries, scratch, piece, piece_stride)
        return True
    bf16, key, s_row = layer[CACHE_FORMAT] == BF16, tile * TILE, 4 * (TILE + 16)
    sinks, begin, end = span(layer, position, key, TILE)
    at = 0 if sinks > 0 else begin
    while at < end:
        stop = sinks if at < sinks else end
        k, _, k_row, _, n = run_of(layer, held, slot, group, key + at)
        n = min(n, stop - at)
        scores.score(bf16, n_shared, queries, 4 * d, d, k, k_row, n, scratch + 4 * at, s_row, k + 16 * k_row)
        at += n
        if sinks <= at < begin:
            at = begin
    for h in range(n_shared):
        here = piece + h * piece_stride
        soften(scratch + h * s_row, sinks, begin, end, numbers[SOFTCAP], here + 4 * d)
        fill(here, 0, d, np.float32(0.0))
    at = 0 if sinks > 0 else begin
    while at < end:
        stop = sinks if at < sinks else end
        _, v, _, v_row, n = run_of(layer, held, slot, group, key + at)
        n = min(n, stop - at)
        for h in range(n_shared):
            here, weights = piece + h * piece_stride, scratch + h * s_row + 4 * at
            if bf16:
                rowwise.mix_bf16(v, v_row, n, weights, d, here)
            else:
                rowwise.mix_fp32(v, v_row, n, weights, d, here)
        at += n
        if sinks <= at < begin:
            at = begin
    return True
