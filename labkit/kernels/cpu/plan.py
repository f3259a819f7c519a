"""A model as numbers: what the compiled step reads instead of modules and configs.

``plan(transformer)`` is made once a model and holds addresses of the model's own weights (nothing is copied but norms
and biases, widened to float32) plus every size and switch. Rows of the tables:

    linears (n, LINEAR)    FORMAT, the numbers at W, BIAS, N_OUT, N_IN; plain: STRIDE, bytes from row to row;
                           packed (``labkit.kernels.panel_layout``): BITS, GROUP, SCALES and MINIMA with SCALE_BYTES and
                           MINIMUM_BYTES of each (1: zero points), ZERO, and ROUNDS: how tokens are rounded
    layers  (n, LAYER)     sizes, switches, norm addresses, and each run's cache and rotary addresses
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from labkit.kernels.cpu import cells
from labkit.kernels.cpu.active_threads import ActiveThreads
from labkit.kernels.panel_layout import BLOCK, Panels

FP32, BF16, PACKED = range(3)
LINEAR = 14
FORMAT, W, SCALES, MINIMA, BIAS, N_OUT, N_IN, STRIDE, GROUP, BITS, SCALE_BYTES, MINIMUM_BYTES, ZERO, ROUNDS = range(
    LINEAR
)
TO_BYTES = 1024
"""In ROUNDS, on top of the inputs that are summed up as integers: tokens become bytes. 0: they stay as they are."""
Q, K, V, O, GATE, UP, DOWN = range(7)
PER_LAYER = 7

(
    N_HEADS, N_KV, D_HEAD, WINDOW, N_SINKS, COS, SIN, N_TURNED, INTERLEAVED, NORMS, QK_NORM, ACTIVATION, GATED, D_FF,
    ATTN_NORM, ATTN_NORM_B, FFN_NORM, FFN_NORM_B, ATTN_POST, ATTN_POST_B, FFN_POST, FFN_POST_B, Q_NORM, K_NORM,
    CACHE_FORMAT, K_CACHE, V_CACHE, HEAD_STRIDE, SLOT_STRIDE, RING, RING_SINKS, SPEC, ROWS, N_EXPERTS, N_ACTIVE,
    D_EXPERT, RENORMALIZE, EXPERTS, CODED,
) = range(39)  # fmt: skip
LAYER = 39
SCALE, SOFTCAP = range(2)
NORM_LAYOUTS = {"pre": 0, "post": 1, "sandwich": 2}
QK_NORMS = {None: 0, "head": 1, "full": 2}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}


@dataclass
class Plan:
    """Tables for one transformer. ``kept`` keeps the widened copies alive."""

    linears: np.ndarray
    layers: np.ndarray
    floats: np.ndarray
    """(n_layers, 2): scale and soft cap of attention."""
    d_model: int
    vocab_size: int
    layer_norm: bool
    eps: float
    logit_softcap: float
    final_norm: tuple[int, int]
    widest: int
    kept: list[Tensor] = field(default_factory=list)
    tables: list[np.ndarray] = field(default_factory=list)
    """Of layers with experts: all their linears (``mixture``)."""
    active: ActiveThreads = field(default_factory=ActiveThreads)
    active_of_many: ActiveThreads = field(default_factory=ActiveThreads)
    """Who takes steps of few tokens, and of many."""
    spare: Tensor | None = None
    """Working memory of the last prompt, for the next one."""

    rotary: dict[Any, tuple[int, Tensor, Tensor]] = field(default_factory=dict)
    """By rotation: the length it is scaled for, cos and sin, for as many positions as the last run asked for."""

    @property
    def fills_blocks(self) -> bool:
        """Whether every linear's inputs are whole blocks of 64."""
        return not (self.linears[:, N_IN] % 64).any()

    def rotary_of(self, opened: Any, layer: Any) -> tuple[Tensor, Tensor]:
        """cos and sin of a layer that turns its heads, for all positions that the open step's cache may hold. The run
        keeps them alive: the next one may need longer ones."""
        n, rope, d_head = opened.cache.capacity_tokens, layer.attention.rope, layer.attention.d_head
        length, cos, sin = self.rotary.get((rope, d_head), (-1, None, None))
        if cos is None or sin is None or length != opened.rope_length(rope) or len(cos) < n:
            cos, sin = (t.contiguous() for t in opened.angles_at(torch.arange(n), rope, d_head))
            self.rotary[rope, d_head] = opened.rope_length(rope), cos, sin
        return cos, sin


_plans: weakref.WeakKeyDictionary[Any, tuple[list[Any], int, Plan | None, str | None]] = weakref.WeakKeyDictionary()
"""By transformer: the dicts that its modules keep their parts in, what those held, and what was found out from it."""


def find(transformer: Any) -> tuple[Plan | None, str | None]:
    """The tables of ``transformer``, or None and why it cannot be compiled. Made when first asked for, and again when
    its weights have moved; to see that they have not takes a millisecond."""
    found = _plans.get(transformer)
    if found is None or found[1] != _stamp(found[0]):
        held = [held for m in transformer.modules() for held in (m._modules, m._parameters, m._buffers)]
        parts, reason = [part for part in held if part], _refusal(transformer)
        made = None if reason else _make(transformer)
        found = _plans[transformer] = parts, _stamp(parts), made, reason
    return found[2], found[3]


def plan(transformer: Any) -> Plan:
    """The tables of a transformer that can be compiled. Raises ValueError when it cannot."""
    made, reason = find(transformer)
    if made is None:
        raise ValueError(f"this model is not compiled: {reason}")
    return made


def _refusal(transformer: Any) -> str | None:
    """Why the compiled step cannot run this model; None when it can."""
    if transformer.device.type != "cpu":
        return f"the model is on {transformer.device}: the compiled step is for the CPU."
    config = transformer.config
    for layer in config.layers:
        if layer.attention.kernels != "grouped":
            return f"{type(layer.attention).__name__} is not compiled: only grouped attention is."
        if getattr(layer.ffn, "kernels", "softmax-top-k") != "softmax-top-k":
            return "experts that are chosen in another way than by the largest softmax are not compiled."
        widths = layer.attention.d_head, layer.ffn.d_ff, getattr(layer.ffn, "d_ff_shared", 0), config.d_model
        if any(width % 8 for width in widths):
            return "d_model, d_ff and d_head must be multiples of 8, the vector's lanes."
        if layer.attention.qk_norm and config.norm.bias:
            return "query and key norms with a bias are not compiled."
    for module in transformer.modules():
        if reason := getattr(module, "why_not_compiled", None):
            return reason
        if isinstance(module, nn.Linear) and module.weight.dtype not in (torch.float32, torch.bfloat16):
            return f"{module.weight.dtype} weights are not compiled: load with dtype='fp32' or 'bf16'."
    return None


def _stamp(parts: list[Any]) -> int:
    """A number that changes when a module is replaced or a weight moves (``parameters()`` takes ten times as long)."""
    return hash(tuple(v.data_ptr() if isinstance(v, Tensor) else id(v) for held in parts for v in held.values()))


def _make(transformer: Any) -> Plan:
    config, kept, tables = transformer.config, [], []
    n = config.n_layers
    linears = np.zeros((PER_LAYER * n + 1, LINEAR), np.int64)
    layers = np.zeros((n, LAYER), np.int64)
    floats = np.zeros((n, 2), np.float32)
    for idx, (block, layer) in enumerate(zip(transformer.layers, config.layers, strict=True)):
        attention, ffn, row = layer.attention, layer.ffn, layers[idx]
        modules = [block.attention.q_proj, block.attention.k_proj, block.attention.v_proj, block.attention.o_proj]
        own = block.ffn
        if hasattr(ffn, "n_experts"):
            tables.append(_mixture(block.ffn, row))
            own = block.ffn.shared
        if own is not None:
            modules += [own.gate_proj, own.up_proj, own.down_proj]
        for i, module in enumerate(modules):
            if module is not None:
                linears[PER_LAYER * idx + i] = _linear(module, kept)
        row[[N_HEADS, N_KV, D_HEAD, N_SINKS]] = (
            attention.n_heads,
            attention.n_kv_heads,
            attention.d_head,
            attention.n_sinks,
        )
        row[WINDOW] = attention.window or 0
        row[[NORMS, QK_NORM]] = NORM_LAYOUTS[layer.norms], QK_NORMS[attention.qk_norm]
        row[[ACTIVATION, GATED]] = ACTIVATIONS[ffn.activation], getattr(ffn, "gated", True)
        row[D_FF] = getattr(ffn, "d_ff_shared", ffn.d_ff)
        norms = {ATTN_NORM: block.attention_norm, FFN_NORM: block.ffn_norm}
        if layer.norms == "sandwich":
            norms |= {ATTN_POST: block.attention_post_norm, FFN_POST: block.ffn_post_norm}
        for at, norm in norms.items():
            row[at], row[at + 1] = _norm(norm, kept)
        if attention.qk_norm is not None:
            row[Q_NORM], row[K_NORM] = (_norm(getattr(block.attention, f"{x}_norm"), kept)[0] for x in "qk")
        floats[idx] = block.attention.scale, attention.softcap or 0.0
    head = transformer.head
    linears[-1] = _linear(head if head is not None else transformer.embedding, kept)
    return Plan(
        linears, layers, floats, config.d_model, config.vocab_size, config.norm.kind == "layer", config.norm.eps,
        config.logit_softcap or 0.0, _norm(transformer.final_norm, kept),
        int(np.concatenate([linears[:-1], *tables])[:, [N_OUT, N_IN]].max()), kept, tables,
    )  # fmt: skip


def _mixture(ffn: Any, row: np.ndarray) -> np.ndarray:
    """The table of a layer's experts, its address and its sizes in the layer's row."""
    config, experts = ffn.config, ffn.experts
    row[[N_EXPERTS, N_ACTIVE]] = config.n_experts, config.n_active
    row[[D_EXPERT, RENORMALIZE]] = config.d_ff, config.renormalize
    found = np.zeros((cells.FIRST_EXPERT + 3 * config.n_experts, LINEAR), np.int64)
    found[cells.ROUTER] = describe(ffn.router)
    if ffn.shared_gate is not None:
        found[cells.SHARED_GATE] = describe(ffn.shared_gate)
    parts = (experts.gate, cells.EXPERT_GATE), (experts.up, cells.EXPERT_UP), (experts.down, cells.EXPERT_DOWN)
    for stack, which in parts:
        for e, weight in enumerate(stack):
            found[cells.FIRST_EXPERT + 3 * e + which] = _plain(weight, 0)
    row[EXPERTS] = found.ctypes.data
    return found


def _linear(module: Any, kept: list[Tensor]) -> list[int]:
    bias = 0 if getattr(module, "bias", None) is None else _widened(module.bias, kept)
    return describe(module, bias)


def describe(module: Any, bias: int = 0) -> list[int]:
    """A linear (plain or packed) as a row of the table of linears; ``bias`` is the address of float32 numbers."""
    if not hasattr(module, "panels"):
        return _plain(module.weight, bias)
    return of_panels(module.panels(), bias, to_bytes=getattr(module, "round_tokens", False))


def of_panels(panels: Panels, bias: int = 0, *, to_bytes: bool = False) -> list[int]:
    """Packed weights as a row of the table; ``to_bytes`` rounds tokens to bytes and not to 16 bits. The numbers stay
    where they are: whoever holds the row holds the panels."""
    row = [0] * LINEAR
    row[FORMAT], row[W], row[SCALES], row[BIAS] = PACKED, panels.codes.data_ptr(), panels.scales.data_ptr(), bias
    row[N_OUT], row[N_IN], row[GROUP], row[BITS] = panels.n_out, panels.n_in, panels.group, panels.bits
    row[SCALE_BYTES], row[ZERO] = panels.scales.itemsize, panels.zero
    if panels.minima is not None:
        row[MINIMA], row[MINIMUM_BYTES] = panels.minima.data_ptr(), panels.minima.itemsize
    row[ROUNDS] = min(panels.group or BLOCK, BLOCK) + (TO_BYTES if to_bytes else 0)
    return row


def _plain(weight: Tensor, bias: int) -> list[int]:
    number = FP32 if weight.dtype == torch.float32 else BF16
    n_out, n_in = weight.shape
    row = [0] * LINEAR
    row[FORMAT], row[W], row[BIAS], row[N_OUT], row[N_IN] = number, weight.data_ptr(), bias, n_out, n_in
    row[STRIDE] = weight.stride(0) * weight.itemsize
    return row


def _norm(module: Any, kept: list[Tensor]) -> tuple[int, int]:
    """Addresses of a norm's weight (its unit offset added) and bias, float32."""
    weight = module.weight.float() + (1.0 if getattr(module, "unit_offset", False) else 0.0)
    bias = getattr(module, "bias", None)
    return _widened(weight, kept), 0 if bias is None else _widened(bias, kept)


def _widened(tensor: Tensor, kept: list[Tensor]) -> int:
    kept.append(tensor.detach().float().contiguous().clone())
    return kept[-1].data_ptr()
