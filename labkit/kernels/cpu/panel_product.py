# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Sixteen rows of weights meet all the tokens of a step: packed (``integer_tiles``) or plain (``tiles``).

Each output is summed up in one order, through the pieces that a row is cut into, whatever the number of tokens. A few
tokens pass a packed panel as it comes from memory; more pass what is made of as much of it as the first-level cache
holds, while lines of the next panel are asked for.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.cpu import blocks, panels, tiles
from labkit.kernels.cpu import integer_tiles as it
from labkit.kernels.cpu.expand import expand, spread
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.memory import FEW_INPUTS, PANEL_BYTES, ROWS, WORD, record_bytes
from labkit.kernels.cpu.plan import BF16, BIAS, BITS, FORMAT, GROUP, N_IN, N_OUT, ROUNDS, STRIDE, TO_BYTES, W
from labkit.kernels.cpu.rowwise import array_at
from labkit.kernels.panel_layout import BLOCK

FEW = 8
"""So many tokens pass a panel as it is stored; for more it is unpacked first. In nibbles only as many as one tile
takes: to take them apart twice costs more than to keep what was made of them."""
AHEAD = 4096
"""How far ahead of what is read lines are asked for, in bytes, where a few tokens wait for memory."""


@jit
def one_panel(linear, panel, records, n_tokens, out, out_stride, own):
    """Sixteen packed rows: out (T, N) at their columns."""
    n_out, bits, rounds, group = linear[N_OUT], linear[BITS], linear[ROUNDS], linear[GROUP]
    n = (linear[N_IN] + BLOCK - 1) // BLOCK * BLOCK
    record, of_bytes = record_bytes(linear[N_IN]), rounds >= TO_BYTES
    size = rounds - TO_BYTES if of_bytes else rounds
    scales, spill = own + PANEL_BYTES, own + PANEL_BYTES + 8 * FEW_INPUTS
    minima = scales + 4 * FEW_INPUTS
    source, few = it.WORDS, n_tokens <= (it.MOST if bits == 4 and not of_bytes else FEW)
    if of_bytes:
        source = it.UNSIGNED
    elif few and bits == 4:
        source = it.NIBBLES
    elif few and bits == 8:
        source = it.BYTES
    most = PANEL_BYTES // (2 * ROWS) if source == it.WORDS else FEW_INPUTS
    unit = max(BLOCK, group)
    n_chunks = -(-n // (most // unit * unit))
    chunk = -(-n // (n_chunks * unit)) * unit
    step_shift = 0
    while (size << step_shift) < BLOCK:
        step_shift += 1
    group_shift = 0 if group != 0 else 62  # one row of scales for all blocks
    while group > (size << group_shift):
        group_shift += 1
    to, to_stride = out + 4 * ROWS * panel, out_stride
    if (panel + 1) * ROWS > n_out:
        to, to_stride = spill, WORD
    n_tiles = -(-n_tokens // (it.MOST_BYTES if of_bytes else it.MOST))
    for at in range(0, n, chunk):
        n_here = min(chunk, n - at)
        codes = linear[W] + (panel * n + at) * 2 * bits
        has_minima = spread(linear, panel, at, n_here, scales, minima)
        if source == it.WORDS:
            expand(bits, codes, n_here // 8, own)
        n_lines, n_blocks = n_here * bits // 32, n_here // size
        ahead = codes + (AHEAD if few else 2 * bits * n_here)  # a panel follows the other
        lines_a_tile = n_lines if few else -(-n_lines // n_tiles)
        t, turn = 0, 0
        while t < n_tokens:
            ask = ahead + 64 * turn * lines_a_tile
            n_ask = -(-lines_a_tile // n_blocks) if turn * lines_a_tile < n_lines else 0
            of_token = records + t * record
            t += it.tile(
                source,
                n_tokens - t,
                (own if source == it.WORDS else codes, n_blocks, size // 8, of_token + at * (1 if of_bytes else 2),
                 record, of_token + 2 * n + at // 16, of_token + 2 * n + n // 16 + at // size * 4, step_shift, scales,
                 minima if has_minima or source != it.BYTES else 0, group_shift, to + t * to_stride, to_stride,
                 1 if at == 0 else 0, ask, n_ask),
            )  # fmt: skip
            turn += 1
    _finish(linear, ROWS * panel, n_tokens, spill, out, out_stride)


@jit
def one_plain_panel(linear, panel, x, x_stride, n_tokens, out, out_stride, own):
    """Sixteen rows of plain numbers, made a panel piece by piece."""
    row, n, n_out, spill = panel * ROWS, linear[N_IN], linear[N_OUT], own + PANEL_BYTES + 8 * FEW_INPUTS
    n_chunks = -(-n * WORD // PANEL_BYTES)
    chunk = -(-n // (n_chunks * 8)) * 8
    to, to_stride = out + 4 * row, out_stride
    if row + ROWS > n_out:
        to, to_stride = spill, WORD
    for at in range(0, n, chunk):
        n_here = min(chunk, n - at)
        pack(linear, row, at, n_here, own)
        ahead, apart, n_ahead, size = _next(linear, row, at, chunk, n)
        n_tiles = -(-n_tokens // 6)
        t, turn = 0, 0
        while t < n_tokens:
            asked, shift = ahead_of(turn, n_tiles, ahead, apart, n_ahead)
            t += tiles.floats(
                n_tokens - t,
                (own, WORD, x + t * x_stride + 4 * at, x_stride, n_here, to + t * to_stride, to_stride,
                 1 if at == 0 else 0, asked, apart, shift, size),
            )  # fmt: skip
            turn += 1
    _finish(linear, row, n_tokens, spill, out, out_stride)


@jit
def pack(linear, row, at, n, panel):
    """Inputs [at, at + n) of 16 plain rows as a panel."""
    stride, last = linear[STRIDE], linear[N_OUT] - 1 - row
    w = linear[W] + row * stride
    for half in range(2):
        if linear[FORMAT] == BF16:
            panels.pack_bf16(w + 2 * at, stride, last, n, half, panel)
        else:
            panels.pack_fp32(w + 4 * at, stride, last, n, half, panel)


@jit
def _next(linear, row, at, chunk, n):
    """The memory of the panel after this one: address, bytes from row to row, rows, and bytes of each that a float of
    a panel stands for, as a power of two."""
    at += chunk
    if at >= n:
        at, row = 0, row + ROWS
    w = linear[W] + row * linear[STRIDE]
    return (w + 2 * at, linear[STRIDE], ROWS, 1) if linear[FORMAT] == BF16 else (w + 4 * at, linear[STRIDE], ROWS, 2)


@jit
def ahead_of(turn, n_tiles, address, apart, n_rows):
    """Which rows the tile ``turn`` asks for: the first one's address, and how many (2^shift) take turns. The rows are
    shared out among a panel's tiles; those that come after ask for what they have."""
    shift = 0
    while (n_tiles << shift) < n_rows:
        shift += 1
    return address + min(turn << shift, n_rows - 1) * apart, shift


@jit
def _finish(linear, row, n_tokens, spill, out, out_stride):
    """The last panel's rows to where they belong, where they are fewer than 16; and the bias."""
    n_rows = min(ROWS, linear[N_OUT] - row)
    if n_rows < ROWS:
        for t in range(n_tokens):
            blocks.copy(spill + t * WORD, n_rows, out + t * out_stride + 4 * row)
    if linear[BIAS] == 0:
        return
    b = carray(array_at(linear[BIAS] + 4 * row), (n_rows,), np.float32)
    for t in range(n_tokens):
        y = carray(array_at(out + t * out_stride + 4 * row), (n_rows,), np.float32)
        for r in range(n_rows):
            y[r] += b[r]
