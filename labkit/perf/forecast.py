"""What a run should take, before it is run: TTFT, ITL, throughput and memory, with the reason for each.

    floor      max(bytes / bandwidth, FLOPs / peak) of each phase: nothing on this machine can be faster
    forecast   what this engine reaches of it (``rates``), plus its measured overhead
    interval   the measured rates' own spread, never narrower than what the equations leave out

Sources: the roofline model (Williams et al., 2009), MFU (PaLM, arXiv 2204.02311), MBU (bytes a step / time /
bandwidth). A roofline is a floor and not a forecast: the distance between the two is what there is to learn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.model.config import ModelConfig
from labkit.perf import formats, memory
from labkit.perf.cost import StepCost, step_cost
from labkit.perf.machine import Machine
from labkit.perf.probe import Engine
from labkit.perf.rates import Rates
from labkit.perf.step_time import Pick, step_seconds

MODEL_ERROR = 0.25
"""Half-width below which an interval would claim more than the equations know: it held three of four measured runs
(``benchmarks/forecast.py``)."""


@dataclass(frozen=True)
class Estimate:
    """A forecast time in seconds, and the interval it should fall into."""

    value: float
    low: float
    high: float

    def __contains__(self, seconds: float) -> bool:
        return self.low <= seconds <= self.high

    def describe(self) -> str:
        """In milliseconds: "41 ms (37 to 46)"."""
        value, low, high = (
            f"{s * 1e3:,.0f}" if s >= 0.1 else f"{s * 1e3:.3g}" for s in (self.value, self.low, self.high)
        )
        return f"{value} ms ({low} to {high})"


@dataclass(frozen=True)
class PhaseForecast:
    """One phase of one step, in seconds."""

    phase: str
    memory_s: float
    """bytes / bandwidth."""
    compute_s: float
    """FLOPs / peak."""
    overhead_s: float
    forecast_s: float
    bytes: float
    flops: float

    @property
    def floor_s(self) -> float:
        return max(self.memory_s, self.compute_s)

    @property
    def bound(self) -> str:
        """Which term is the largest: "memory", "compute" or "overhead"."""
        if self.overhead_s > max(self.floor_s, self.forecast_s - self.overhead_s):
            return "overhead"
        return "compute" if self.compute_s > self.memory_s else "memory"


@dataclass(frozen=True)
class StageForecast:
    """Prefill as a whole, or one decode step."""

    phases: dict[str, PhaseForecast]
    time: Estimate
    mfu: float
    """Share of the matmul peak: FLOPs / (time x peak)."""
    mbu: float
    """Share of the memory bandwidth: bytes / (time x bandwidth)."""
    intensity: float
    """FLOPs a byte."""

    @property
    def floor_s(self) -> float:
        return sum(phase.floor_s for phase in self.phases.values())

    @property
    def bound(self) -> str:
        """The term that takes the most time over all phases: "memory", "compute" or "overhead"."""
        terms = {"memory": 0.0, "compute": 0.0, "overhead": 0.0}
        for phase in self.phases.values():
            terms["overhead"] += phase.overhead_s
            side = "compute" if phase.compute_s > phase.memory_s else "memory"
            terms[side] += phase.forecast_s - phase.overhead_s
        return max(terms, key=lambda name: terms[name])


@dataclass(frozen=True)
class Forecast:
    """A run: ``prefill`` and one ``decode`` step at the middle of the answer."""

    engine: Engine
    machine: Machine
    n_prompt_tokens: int
    n_new_tokens: int
    n_sequences: int
    prefill: StageForecast
    decode: StageForecast
    memory: memory.Memory
    from_sheet: bool = False
    """True: no rates were measured; floors, and a count of launches."""

    @property
    def ttft(self) -> Estimate:
        return self.prefill.time

    @property
    def itl(self) -> Estimate:
        return self.decode.time

    @property
    def prefill_tok_s(self) -> float:
        return self.n_prompt_tokens * self.n_sequences / self.ttft.value

    @property
    def decode_tok_s(self) -> float:
        """All sequences together."""
        return self.n_sequences / self.itl.value

    @property
    def ridge(self) -> float:
        return self.machine.ridge(peak_dtype(self.machine, self.engine.dtype))

    def rows(self) -> list[dict[str, Any]]:
        """A table: one row a phase and stage, milliseconds."""
        return [
            {
                "stage": stage,
                "phase": phase.phase,
                "floor_ms": phase.floor_s * 1e3,
                "overhead_ms": phase.overhead_s * 1e3,
                "forecast_ms": phase.forecast_s * 1e3,
                "bound by": phase.bound,
            }
            for stage, found in (("prefill", self.prefill), ("decode", self.decode))
            for phase in found.phases.values()
        ]


def forecast(
    config: ModelConfig,
    engine: Engine,
    *,
    n_prompt_tokens: int,
    n_new_tokens: int = 64,
    n_sequences: int = 1,
    machine: Machine | None = None,
    rates: Rates | None = None,
    estimate: bool = False,
    progress: Callable[[float, str], None] | None = None,
) -> Forecast:
    """What a run of ``n_new_tokens`` after ``n_prompt_tokens`` should take on ``engine``.

    ``machine`` and ``rates`` None are measured here, or read from the cache of the last measurement (seconds the
    first time). With a data sheet's machine, or ``estimate``, nothing is measured: floors plus launches.
    Raises ValueError for counts below 1 or a run longer than the model's context, RuntimeError when the engine does not
    run here.
    """
    if min(n_prompt_tokens, n_new_tokens, n_sequences) < 1:
        raise ValueError(
            f"n_prompt_tokens={n_prompt_tokens}, n_new_tokens={n_new_tokens}, n_sequences={n_sequences}: "
            "each must be at least 1."
        )
    if n_prompt_tokens + n_new_tokens - 1 > config.context_tokens:
        raise ValueError(
            f"{n_prompt_tokens} + {n_new_tokens} tokens exceed the model's context of {config.context_tokens}."
        )
    if machine is None:
        from labkit.perf import hardware

        machine = hardware.machine(engine.device, progress=progress)
    if rates is None and machine.measured and not estimate:
        from labkit.perf import rates as rates_module

        rates = rates_module.rates(config, engine, progress=progress)
    middle = n_prompt_tokens + n_new_tokens // 2
    chunks = prefill_chunks(n_prompt_tokens, engine)
    prefill = [_priced(config, engine, n_new, n_past, n_sequences) for n_past, n_new in chunks]
    if formats.cache_class(engine.kv_cache)[0].keeps_history:
        decode = _priced(config, engine, 1, middle, n_sequences)
    else:
        decode = _priced(config, engine, middle + 1, 0, n_sequences)
    setting = memory.Setting(
        engine.dtype, formats.held_form(engine), engine.kv_cache, n_prompt_tokens + n_new_tokens - 1, n_sequences
    )
    return Forecast(
        engine,
        machine,
        n_prompt_tokens,
        n_new_tokens,
        n_sequences,
        _stage(config, engine, machine, rates, prefill),
        _stage(config, engine, machine, rates, [decode]),
        memory.memory_of(config, setting),
        from_sheet=rates is None,
    )


def prefill_chunks(n_prompt_tokens: int, engine: Engine) -> list[tuple[int, int]]:
    """(past, new) of each step that the pipeline's prefill takes."""
    if not formats.cache_class(engine.kv_cache)[0].keeps_history:
        return [(0, n_prompt_tokens)]
    chunk = memory.PREFILL_CHUNK_TOKENS if engine.device == "cpu" else 8192
    return [(past, min(chunk, n_prompt_tokens - past)) for past in range(0, n_prompt_tokens, chunk)]


def peak_dtype(machine: Machine, dtype: str) -> str:
    """The matmul rate that counts for ``dtype``; fp32's where the machine has none of its own."""
    return dtype if dtype in machine.matmul else "fp32"


def _priced(config: ModelConfig, engine: Engine, n_new: int, n_past: int, n_sequences: int) -> StepCost:
    setting: dict[str, Any] = {"dtype": engine.dtype, "weights": engine.weights, "kv_cache": engine.kv_cache}
    return step_cost(config, n_new=n_new, n_past=n_past, n_sequences=n_sequences, **setting)


def _stage(
    config: ModelConfig, engine: Engine, machine: Machine, rates: Rates | None, steps: list[StepCost]
) -> StageForecast:
    """All steps of a stage, three times: at the rates' medians, their fast ends and their slow ends."""
    from labkit.perf.launches import sheet_seconds

    if rates is None:
        seconds = [sheet_seconds(config, machine, step) for step in steps]
        ends = seconds, seconds
    else:
        picks: tuple[Pick, ...] = (lambda r: r.value, lambda r: r.low, lambda r: r.high)
        seconds, *ends = ([step_seconds(config, engine, machine, rates, s, pick) for s in steps] for pick in picks)
    floors = [_floors(machine, engine, step) for step in steps]
    phases: dict[str, PhaseForecast] = {}
    for name in seconds[0]:
        parts = [f.get(name, (0.0, 0.0, 0.0, 0.0)) for f in floors]
        memory_s, compute_s, n_bytes, flops = (sum(part[i] for part in parts) for i in range(4))
        overhead = sum(s[name][0] for s in seconds)
        total = sum(s[name][1] for s in seconds)
        phases[name] = PhaseForecast(name, memory_s, compute_s, overhead, total, n_bytes, flops)
    value = sum(phase.forecast_s for phase in phases.values())
    low, high = (sum(total for s in end for _, total in s.values()) for end in ends)
    low, high = min(low, value * (1 - MODEL_ERROR)), max(high, value * (1 + MODEL_ERROR))
    n_bytes, flops = (sum(getattr(step.total, name) for step in steps) for name in ("bytes", "flops"))
    return StageForecast(
        phases,
        Estimate(value, low, high),
        mfu=flops / (value * machine.peak_flops(peak_dtype(machine, engine.dtype))),
        mbu=n_bytes / (value * machine.read.value),
        intensity=flops / n_bytes,
    )


def _floors(machine: Machine, engine: Engine, step: StepCost) -> dict[str, tuple[float, float, float, float]]:
    """Phase -> seconds of its bytes, seconds of its FLOPs, bytes, FLOPs."""
    peak = machine.peak_flops(peak_dtype(machine, engine.dtype))
    return {
        name: (cost.bytes / machine.read.value, cost.flops / peak, cost.bytes, cost.flops)
        for name, cost in step.phases.items()
    }
