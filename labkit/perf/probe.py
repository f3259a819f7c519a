"""How fast each part of a step runs on this machine, measured on small stand-in models of standard widths.

A ceiling is what the hardware could do; an engine reaches some share of it, which depends on the backend, the
format of the weights, the dtype and how many tokens go through together. That share is measured here, once for
each such combination, on models that are *not* the one to be forecast:

    shell     the model's own layers shrunk to a width of 64: next to no bytes and no FLOPs, so its time is overhead
    narrow    a Llama-like model 512 wide, four layers
    wide      one 1,024 wide (4,096 on a GPU)

Each runs real steps through the real backend, cache and timer; the processor's caches are swept before each step,
and between the shell's layers as much memory is read as a real layer streams, because that is what makes a real
step's small operations slower than the same ones in a loop.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any

import torch

from labkit import backends, registry
from labkit.model.config import (
    Attention,
    DenseFFN,
    GroupedAttention,
    Layer,
    ModelConfig,
    MoEFFN,
    Rope,
    as_dtype,
    dtype_name,
    uniform,
)
from labkit.model.transformer import Transformer
from labkit.perf.cost import step_cost
from labkit.perf.cuda_timer import CudaTimer
from labkit.perf.device import flush_bytes
from labkit.perf.timer import NULL_TIMER, Timer
from labkit.quant import form_of

N_REPEATS = 5
N_LAYERS = 4
"""Of a stand-in: a thread that comes late at the start of a step, as in a real run, should not count for much more."""
POINT_BUDGET_S = 1.2
"""A point that would take longer than this is left out; its rate is taken from the next smaller one."""
MODEL_BUDGET_S = 4.0
"""Repeats of one stand-in stop after this: on a machine that is too busy, more would not be better."""
SHELL_WIDTH = 64
N_SHELL_LAYERS = 16
"""Enough that the first layer's cold start does not count for all of them."""
VOCABULARY = 8192
FAR_TOKENS = 4096
"""Context at which the cost of a cached byte is read."""


@dataclass(frozen=True)
class Engine:
    """What computes a step: names as ``load`` and ``Pipeline`` take them."""

    backend: Any = "reference"
    weights: Any = None
    dtype: str = "fp32"
    kv_cache: Any = "contiguous"
    device: str = "cpu"

    def label(self) -> str:
        parts = (self.backend, self.weights or "dense", self.dtype, self.kv_cache, self.device)
        return "/".join(part if isinstance(part, str) else repr(part) for part in parts)


@dataclass(frozen=True)
class Point:
    """One step to time: ``n_new`` tokens for each of ``n_sequences`` sequences of ``n_past``, on one stand-in."""

    model: str
    n_new: int
    n_past: int = 0
    n_sequences: int = 1

    @property
    def n_rows(self) -> int:
        return self.n_new * self.n_sequences


def engine_of(model: Any, *, kv_cache: Any = "contiguous", backend: Any = "auto") -> Engine:
    """The engine that a ``Pipeline(model, kv_cache=..., backend=...)`` would run on, "auto" resolved."""
    transformer = model.transformer
    component, options = registry.find("kv_cache", kv_cache)
    cache = component.build(
        options, layers=transformer.cache_entries, capacity_tokens=1, device=model.device, dtype=model.dtype
    )
    if options is not None and component.config is not None and options == component.config():
        kv_cache = component.name  # the same engine by either spelling
    wanted = model.backend if backend == "auto" else backend
    chosen = backends.choose(wanted, transformer=transformer, cache=cache)
    return Engine(chosen, model.weights, dtype_name(model.dtype), kv_cache, model.device.type)


def widths(device: str) -> dict[str, int]:
    """The stand-ins' widths."""
    return {"narrow": 512, "wide": 1024} if device == "cpu" else {"narrow": 1024, "wide": 4096}


def plan(device: str) -> list[Point]:
    """The points, cheapest first within each model."""
    longest = 1024 if device == "cpu" else 4096
    points = [Point("shell", 1), Point("shell", 1, 8, 2), Point("shell", 1, 8, 4), Point("narrow", 1, FAR_TOKENS)]
    points += [Point(model, n) for model in ("narrow", "wide") for n in (1, 4, 16, 64, 256)]
    return [*points, Point("narrow", longest), Point("narrow", 256, 768)]


def shell_of(config: ModelConfig) -> ModelConfig:
    """The same operations in the same order, with next to nothing in them: 16 of its layers at a width of 64."""
    layers = []
    for idx in range(N_SHELL_LAYERS):
        layer = config.layers[idx % config.n_layers]
        a, f = layer.attention, layer.ffn
        small = _small(a)
        if isinstance(f, MoEFFN):
            ffn: Any = replace(f, d_ff=64, d_ff_shared=64 if f.d_ff_shared else 0)
        else:
            ffn = replace(f, d_ff=64)
        layers.append(Layer(small, ffn, layer.norms))
    return replace(config, vocab_size=256, d_model=SHELL_WIDTH, context_tokens=4096, layers=tuple(layers))


def _small(attention: Attention) -> Attention:
    """The same kind of attention, two narrow heads of it. What is no wider than that already stays as it is."""
    if not isinstance(attention, GroupedAttention):
        return attention
    n_kv = 1 if attention.n_kv_heads < attention.n_heads else 2
    rope = None if attention.rope is None else Rope(attention.rope.theta, attention.rope.layout)
    return replace(attention, n_heads=2, n_kv_heads=n_kv, d_head=32, rope=rope)


def group_size(config: ModelConfig) -> int:
    """Query heads that share a key head: reading a cached byte costs the more, the more of them meet it."""
    return config.n_heads // config.n_kv_heads


def stand_in(width: int, group: int = 4) -> ModelConfig:
    """A Llama-like model: GQA with ``group`` query heads a key head, SwiGLU 11/4 of the width."""
    n_kv = max(1, round(width / 64 / group))
    attention = GroupedAttention(n_kv * group, n_kv, 64, rope=Rope())
    return ModelConfig("llama", VOCABULARY, width, 8192, uniform(N_LAYERS, attention, DenseFFN(width * 11 // 4)))


def stand_ins(config: ModelConfig, device: str) -> dict[str, ModelConfig]:
    """What is timed to forecast a model of this config, by name."""
    group = group_size(config)
    return {"shell": shell_of(config), **{name: stand_in(width, group) for name, width in widths(device).items()}}


def build(config: ModelConfig, engine: Engine) -> Transformer:
    """The config with weights that mean nothing, held as the engine holds them."""
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device=engine.device)
    generator = torch.Generator(device=engine.device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
        else:
            parameter.data.uniform_(-0.05, 0.05, generator=generator)
    model = model.to(as_dtype(engine.dtype)).eval()
    form = form_of(engine.weights)
    if form is None:
        return model
    component, options = registry.find("weights", form)
    return component.build(options, transformer=model)


class Bench:
    """One stand-in, its step function and its cache."""

    def __init__(
        self, config: ModelConfig, engine: Engine, *, transformer: Transformer | None = None, sweep_bytes: int = 0
    ) -> None:
        self.config, self.engine = config, engine
        self.transformer = transformer if transformer is not None else build(config, engine)
        self._backend = backends.find(engine.backend)
        alone = self._backend.name == "fused"
        self._flush = _sweeper(engine.device, flush_bytes(engine.device), alone=alone)
        sweep = _sweeper(engine.device, sweep_bytes, alone=alone) if sweep_bytes else _nothing
        self._between_layers: Callable[[], bool] = lambda: sweep() is None

    def sample(self, point: Point) -> dict[str, float]:
        """Seconds by phase of one run of the point's step, ``"step"`` for all of it.

        Without a history there is no past: such a cache's points are timed as if ``n_past`` were 0."""
        cache = self._cache(point)
        step = self._step(cache)
        n_rows = point.n_rows
        ids = torch.arange(n_rows, device=self.engine.device) % 250
        if point.n_new == point.n_sequences == 1:  # what a run does once, before its second token, is not a step's cost
            step(ids, timer=NULL_TIMER, should_stop=_never)
            cache.truncate(point.n_past if cache.keeps_history else 0)
        self._flush()
        self._backend.wake()
        timer: Any = CudaTimer(detail_every=0) if self.engine.device == "cuda" else Timer(detail_every=0)
        timer.begin()
        timer.begin_step("prefill" if point.n_new > 1 else "decode")
        counts = None if point.n_sequences == 1 else dict.fromkeys(range(point.n_sequences), point.n_new)
        step(ids, counts=counts, timer=timer, should_stop=self._between_layers)
        timer.end_step()
        if isinstance(timer, CudaTimer):
            timer.finish()
        record = timer.records()[0]
        took = sum(record.phases.values()) if self.engine.device == "cuda" else record.end_s - record.start_s
        return {**record.phases, "step": took}

    def _step(self, cache: Any) -> Any:
        """The backend's step. Raises ValueError when the backend would hand the work to another one."""
        if self._backend.no_forecast is not None:
            raise ValueError(self._backend.no_forecast)
        self._backend.prepare(None)
        name, step = backends.bind(self._backend.name, transformer=self.transformer, cache=cache)
        if step.computed_by != name:
            raise ValueError(f"backend {name!r} leaves this to the reference: {step.reason}")
        return step

    def _cache(self, point: Point) -> Any:
        """A fresh cache that holds ``n_past`` tokens of each sequence: memory is touched for the first time, as in
        a real run."""
        component, options = registry.find("kv_cache", self.engine.kv_cache)
        cache = component.build(
            options,
            layers=self.transformer.cache_entries,
            capacity_tokens=point.n_past + point.n_new + 1,
            n_sequences=point.n_sequences,
            device=torch.device(self.engine.device),
            dtype=as_dtype(self.engine.dtype),
        )
        if point.n_past and cache.keeps_history:
            cache.begin(dict.fromkeys(range(point.n_sequences), point.n_past))
            n = point.n_past * point.n_sequences
            for idx, layer in enumerate(self.transformer.cache_entries):
                made = {e.name: torch.rand((n, *e.shape), device=self.engine.device) for e in layer.entries}
                cache.append(idx, **{name: t.to(as_dtype(self.engine.dtype)) for name, t in made.items()})
            cache.commit()
        return cache


def run_plan(
    benches: dict[str, Callable[[], Bench]], points: Sequence[Point], *, progress: Callable[[float, str], None]
) -> Iterator[tuple[Point, list[dict[str, float]]]]:
    """Each point's samples; one stand-in in memory at a time, its points taking turns."""
    with torch.inference_mode():
        for at, (name, make) in enumerate(benches.items()):
            progress(at / len(benches), f"measuring the {name} stand-in")
            bench = make()
            mine = [point for point in points if point.model == name]
            affordable, slowest = [], 0.0
            for point in sorted(mine, key=lambda p: p.n_rows):  # also the warm-up
                if slowest > POINT_BUDGET_S / 4 and point.n_rows > 4:
                    break
                slowest = bench.sample(point)["step"]
                affordable.append(point)
            samples: dict[Point, list[dict[str, float]]] = {point: [] for point in affordable}
            began = time.perf_counter()
            for idx in range(N_REPEATS):
                if idx and time.perf_counter() - began > MODEL_BUDGET_S:
                    break
                for point in affordable:
                    samples[point].append(bench.sample(point))
            yield from samples.items()
            del bench
            gc.collect()


def sweep_bytes(config: ModelConfig, engine: Engine) -> int:
    """What the shell reads between its layers: as much as one of the model's own streams, to a power of two."""
    if engine.device != "cpu":
        return 0
    setting: dict[str, Any] = {"dtype": engine.dtype, "weights": engine.weights, "kv_cache": engine.kv_cache}
    streamed = step_cost(config, **setting).layers[0].bytes
    return 2 ** round(log2(min(max(streamed, 2**20), 2**25)))


def _sweeper(device: str, n_bytes: int, *, alone: bool) -> Callable[[], Any]:
    """Reads that many bytes, which pushes as much out of the caches. ``alone``: on one thread. PyTorch's others go on
    looking for work for milliseconds after a sum, on cores that the fused step's own threads need."""
    buffer = torch.ones(n_bytes // 4, device=device)
    return buffer.numpy().sum if alone and device == "cpu" else buffer.sum


def _never() -> bool:
    return False


def _nothing() -> bool:
    """Something that is not None, as a sweep's result is."""
    return True
