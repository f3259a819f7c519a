# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Sixteen rows of plain weights meet a few tokens as they lie: where reading them is what takes the time.

The sums are those of ``panel_product.one_plain_panel``, in its order: pieces of the inputs one after the other.
"""

from __future__ import annotations

from labkit.kernels.cpu.blocks import copy, floats
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.memory import PANEL_BYTES, ROWS, WORD
from labkit.kernels.cpu.plan import BF16, BIAS, FORMAT, N_IN, N_OUT, STRIDE, W
from labkit.kernels.cpu.scores import score

MOST_TOKENS = 4


@jit
def rows_as_they_lie(linear, panel, x, x_stride, n_tokens, out, out_stride, own):
    """out (T, N) at the columns of a panel, T at most MOST_TOKENS; own: a thread's own memory for a product."""
    row, n, stride = panel * ROWS, linear[N_IN], linear[STRIDE]
    n_rows, bf16 = min(ROWS, linear[N_OUT] - row), linear[FORMAT] == BF16
    size = 2 if bf16 else 4
    n_chunks = -(-n * WORD // PANEL_BYTES)
    chunk = -(-n // (n_chunks * 8)) * 8
    w = linear[W] + row * stride
    for at in range(0, n, chunk):
        n_here = min(chunk, n - at)
        ask = w + ROWS * stride + ROWS * size * at
        score(bf16, n_tokens, x + 4 * at, x_stride, n_here, w + size * at, stride, n_rows, own, WORD, ask)
        for t in range(n_tokens):
            to = out + t * out_stride + 4 * row
            if at == 0:
                copy(own + t * WORD, n_rows, to)
                continue
            y, more = floats(to, n_rows), floats(own + t * WORD, n_rows)
            for r in range(n_rows):
                y[r] = more[r] + y[r]
    if linear[BIAS] == 0:
        return
    bias = floats(linear[BIAS] + 4 * row, n_rows)
    for t in range(n_tokens):
        y = floats(out + t * out_stride + 4 * row, n_rows)
        for r in range(n_rows):
            y[r] += bias[r]
