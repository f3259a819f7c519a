"""Where one layer's stored keys and values lie, as a row of integers that compiled code reads."""

from __future__ import annotations

import numpy as np

KINDS = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3}
BF16 = KINDS["bf16"]
MAX_ROWS = 4
"""Query heads that one pass serves: 2 x 4 accumulators, the operands and the grid fill 16 vector registers."""
MAX_BLOCK = 256

SPEC = (
    "kind", "block", "n_groups", "dims_k", "dims_v",
    "k", "k_group", "k_block", "k_row",
    "k_scale", "k_zero", "k_scale_group", "k_scale_block",
    "v", "v_group", "v_block", "v_row",
    "v_scale", "v_zero", "v_scale_group", "v_scale_block", "v_grids",
    "recent_kind", "recent_tokens", "recent_k", "recent_k_seq", "recent_k_group", "recent_k_row",
    "recent_v", "recent_v_seq", "recent_v_group", "recent_v_row",
)  # fmt: skip
"""Fields of ``spec``: addresses (``k``), strides in bytes (``k_group``: from a KV head to the next; ``k_row``: from a
token to the next, or from a channel to the next when K lies by channel), and sizes. ``v_grids``: scales a token.
``recent_*``: the full-precision ring of the latest tokens; position p lies at p mod recent_tokens."""
(
    KIND, BLOCK, N_GROUPS, DIMS_K, DIMS_V, K, K_GROUP, K_BLOCK, K_ROW, K_SCALE, K_ZERO, K_SCALE_GROUP, K_SCALE_BLOCK,
    V, V_GROUP, V_BLOCK, V_ROW, V_SCALE, V_ZERO, V_SCALE_GROUP, V_SCALE_BLOCK, V_GRIDS,
    RECENT_KIND, RECENT_TOKENS, RECENT_K, RECENT_K_SEQ, RECENT_K_GROUP, RECENT_K_ROW,
    RECENT_V, RECENT_V_SEQ, RECENT_V_GROUP, RECENT_V_ROW,
) = range(len(SPEC))  # fmt: skip
N_SPEC = len(SPEC)


def make_spec(**fields: int) -> np.ndarray:
    """The (len(SPEC),) int64 array that names these fields; those left out are 0."""
    unknown = set(fields) - set(SPEC)
    if unknown:
        raise ValueError(f"unknown field {', '.join(sorted(unknown))}: a spec has {', '.join(SPEC)}.")
    return np.array([fields.get(name, 0) for name in SPEC], dtype=np.int64)


def why_not(kind: str, *, block: int, dims_k: int, dims_v: int, v_grids: int = 1) -> str | None:
    """Why this kernel cannot serve such a storage; None when it can."""
    if kind not in KINDS:
        return f"the CPU kernel reads {', '.join(KINDS)}, not {kind}"
    step = 16 if kind in ("int8", "int4") else 8
    if block % step or block > MAX_BLOCK:
        return f"the CPU kernel reads {kind} blocks of a multiple of {step} tokens up to {MAX_BLOCK}, not {block}"
    if dims_k % 8 or dims_v % 16:
        return f"the CPU kernel reads heads of a multiple of 16 dims, not {dims_k} and {dims_v}"
    if (kind == "int8" and (dims_v // v_grids) % 16) or (kind == "int4" and (dims_v // v_grids) % 8):
        return f"the CPU kernel reads value groups of a multiple of 16 dims, not {dims_v // v_grids}"
    return None
