# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportAttributeAccessIssue=false
"""Sixteen rows of plain weights meet a few tokens as they lie: where reading them is what takes the time.

The sums are those of ``panel_product.one_plain_panel``: one chain over the inputs, through all of its pieces.
"""

from __future__ import annotations

from labkit.kernels.cpu.blocks import copy, floats
from labkit.kernels.cpu.jit import jit
from labkit.kernels.cpu.memory import ROWS, WORD
from labkit.kernels.cpu.plan import BF16, BIAS, FORMAT, N_IN, N_OUT, STRIDE, W
from labkit.kernels.cpu.scores import score

MOST_TOKENS = 4


@jit
def rows_as_they_lie(linear, panel, x, x_stride, n_tokens, out, out_stride, own):
    """out (T, N) at the columns of a panel, T at most MOST_TOKENS; own: a thread's own memory for a product."""
    row, n, stride = panel * ROWS, linear[N_IN], linear[STRIDE]
    n_rows, bf16 = min(ROWS, linear[N_OUT] - row), linear[FORMAT] == BF16
    w = linear[W] + row * stride
    score(bf16, n_tokens, x, x_stride, n, w, stride, n_rows, own, WORD, w + ROWS * stride)
    for t in range(n_tokens):
        copy(own + t * WORD, n_rows, out + t * out_stride + 4 * row)
    if linear[BIAS] == 0:
        return
    bias = floats(linear[BIAS] + 4 * row, n_rows)
    for t in range(n_tokens):
        y = floats(out + t * out_stride + 4 * row, n_rows)
        for r in range(n_rows):
            y[r] += bias[r]
