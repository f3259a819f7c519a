"""The time of one step, phase by phase, from measured rates: the equations of ``labkit.perf.rates`` run forward."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from labkit.model.config import ModelConfig, MoEFFN
from labkit.perf.cost import StepCost, step_cost
from labkit.perf.machine import Machine, Rate
from labkit.perf.probe import Engine
from labkit.perf.rates import Rates

Pick = Callable[[Rate], float]
"""Which end of a rate to take: its median, its fast or its slow side."""


def step_seconds(
    config: ModelConfig, engine: Engine, machine: Machine, rates: Rates, step: StepCost, pick: Pick
) -> dict[str, tuple[float, float]]:
    """Phase -> (overhead, overhead and work together), by the equations in ``rates``."""
    rows, n_layers, width = step.n_rows, config.n_layers, config.d_model
    s_weight = pick(rates.weight(width, rows))
    attention, ffn = step.phases["attention"], step.phases["ffn"]
    d_q = sum(layer.attention.n_heads * layer.attention.d_head for layer in config.layers)
    work = {
        "attention": attention.n_weights * s_weight + _scores(config, engine, machine, rates, step, pick),
        "ffn": ffn.n_weights * pick(rates.weight(width, _rows_of_ffn(config, rows))),
        "norm": sum(2 if layer.norms != "sandwich" else 4 for layer in config.layers)
        * rows
        * width
        * pick(rates.norm_s),
        "kv_cache": step.phases["kv_cache"].kv_write_bytes * pick(rates.kv_write_s),
        "embed": step.phases["embed"].bytes / machine.read.value,
        "lm_head": step.phases["lm_head"].n_weights * pick(rates.head(width)),
        "sample": step.n_sequences * config.vocab_size * 12 / machine.copy.value,
        "schedule": 0.0,
    }
    if rows > step.n_sequences:
        work["attention"] += rows * d_q * pick(rates.rotary_s)
    if step.n_sequences > 1:
        one, many = rates.weight(width, 1), rates.weight(width, step.n_sequences)
        work["lm_head"] *= pick(many) / pick(one)
    per_layer = ("attention", "ffn", "norm", "kv_cache")
    fixed = {
        name: pick(rates.overhead_s.get(name, Rate.exactly(0.0))) * (n_layers if name in per_layer else 1)
        for name in work
    }
    fixed["attention"] += (step.n_sequences - 1) * n_layers * pick(rates.sequence_s)
    if engine.device == "cuda":  # the host launches ahead of the device: the slower of the two sets the pace
        return {name: (max(0.0, fixed[name] - work[name]), max(fixed[name], work[name])) for name in work}
    return {name: (fixed[name], fixed[name] + work[name]) for name in work}


def _scores(config: ModelConfig, engine: Engine, machine: Machine, rates: Rates, step: StepCost, pick: Pick) -> float:
    """Attention over the context: bytes for one query, FLOPs for many."""
    cost = step.phases["attention"]
    if step.n_new == 1:
        together = _imbalance(config.n_kv_heads, machine) / _imbalance(rates.n_heads_together, machine)
        return cost.kv_read_bytes * pick(rates.kv_byte_s) * (together if engine.backend == "reference" else 1.0)
    if step.n_past == 0:
        return cost.attention_flops * pick(rates.score_flop_s)
    square = step_cost(
        config, n_new=step.n_new, n_past=step.n_past, n_sequences=step.n_sequences, dtype=engine.dtype, full_square=True
    )
    return square.phases["attention"].attention_flops * pick(rates.chunk_flop_s)


def _imbalance(n_heads: int, machine: Machine) -> float:
    """Key heads are shared out among threads whole: 3 heads on 2 threads take as long as 4."""
    n = machine.n_threads if machine.device == "cpu" else 1
    return ceil(n_heads / n) * n / n_heads if n_heads else 1.0


def _rows_of_ffn(config: ModelConfig, rows: int) -> float:
    """Tokens that meet in one product: all of them, or an expert's share."""
    ffn = config.layers[0].ffn
    if not isinstance(ffn, MoEFFN):
        return rows
    visited = ffn.n_active / ffn.n_experts
    return max(1.0, rows * visited / (1.0 - (1.0 - visited) ** rows))
