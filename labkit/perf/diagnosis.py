"""Slow to start or slow to stream? A finished run held against this machine's ceilings.

    slow to start    the wait is before the first token: the prompt's FLOPs
    slow to stream   the wait is between tokens: the weights' and the cache's bytes

Then which ceiling binds. Bytes and FLOPs say how long the hardware needs at least; when they explain little of the
time, neither ceiling binds and what is left is overhead: operations sent one by one, Python, threads that wait.

The words for causes and remedies are ``labkit.perf.verdict``'s, which a diagnosis of a server shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from labkit.model.config import DTYPES, dtype_name
from labkit.perf.cost import decode_cost, prefill_cost
from labkit.perf.formats import bytes_a_weight
from labkit.perf.machine import Machine
from labkit.perf.trace import Trace
from labkit.perf.verdict import Finding, NextStep, Say

BINDS = 0.5
"""A ceiling that explains this share of the time is the one that binds."""
GROWTH = 1.25
"""The last quarter's ITL over the first quarter's, above which the context is felt."""


@dataclass(frozen=True)
class Diagnosis(Finding):
    """A finding that knows its ceiling. ``bound``: "compute", "memory" or "overhead"."""

    bound: str = "overhead"
    mfu: float = 0.0
    mbu: float = 0.0

    @property
    def stage(self) -> str:
        return self.cause.removesuffix("-bound")

    def why(self, say: Say = str.format) -> str:
        return say("{cause}, and {bound}", cause=super().why(say), bound=say(_BOUND_WORDS[self.bound]))


_BOUND_WORDS = {
    "compute": "arithmetic binds",
    "memory": "memory bandwidth binds",
    "overhead": "neither ceiling binds, overhead does",
}


def diagnose(trace: Trace, *, model: Any = None, machine: Machine | None = None, say: Say = str.format) -> Diagnosis:
    """What a run's time was spent waiting for.

    ``model`` gives exact FLOPs and bytes; without it they are estimated from the trace's own record of the weights.
    ``machine`` None is this machine, measured once. ``say`` fills in the evidence's sentences. Raises
    ValueError when the run made no token.
    """
    if trace.ttft_s is None:
        raise ValueError("the run made no token: there is nothing to diagnose. Let it run until the first token.")
    if machine is None:
        from labkit.perf import hardware

        machine = hardware.machine(str(trace.meta.get("device", "cpu")))
    itl = trace.itl_s
    streaming_s = sum(itl)
    starts_slow = trace.ttft_s >= streaming_s
    stage = "prefill" if starts_slow else "decode"
    took = trace.ttft_s if starts_slow else median(trace.round_s or [0.0]) or 1e-9
    flops, n_bytes = _work(trace, model, stage)
    dtype = str(trace.meta.get("dtype", "fp32"))
    peak = machine.peak_flops(dtype if dtype in machine.matmul else "fp32")
    mfu, mbu = flops / (took * peak), n_bytes / (took * machine.read.value)
    bound = "overhead" if max(mfu, mbu) < BINDS else ("compute" if mfu > mbu else "memory")
    evidence = _evidence(say, trace, machine, stage, took, mfu, mbu, flops, n_bytes)
    steps = tuple(_next_steps(trace, stage, bound))
    return Diagnosis(f"{stage}-bound", tuple(evidence), steps, bound=bound, mfu=mfu, mbu=mbu)


def _work(trace: Trace, model: Any, stage: str) -> tuple[float, float]:
    """FLOPs and bytes of the prefill, or of the decode step in the middle."""
    middle = trace.n_prompt_tokens + trace.n_tokens // 2
    if model is not None:
        setting = {"dtype": dtype_name(model.dtype), "weights": model.weights}
        kv_cache = trace.meta.get("kv_cache", "contiguous")
        if stage == "prefill":
            total = prefill_cost(model.config, trace.n_prompt_tokens, kv_cache=kv_cache, **setting).total
        else:
            total = decode_cost(model.config, middle, kv_cache=kv_cache, **setting).total
        return total.flops, total.bytes
    weights_bytes = float(trace.meta.get("weights_bytes", 0))
    n_weights = weights_bytes / bytes_a_weight(trace.meta.get("weights"), dtype=str(trace.meta.get("dtype", "fp32")))
    n_tokens = trace.n_prompt_tokens if stage == "prefill" or trace.meta.get("kv_cache") == "none" else 1
    return 2.0 * n_weights * n_tokens, weights_bytes


def _evidence(
    say: Say,
    trace: Trace,
    machine: Machine,
    stage: str,
    took: float,
    mfu: float,
    mbu: float,
    flops: float,
    n_bytes: float,
) -> list[str]:
    itl, ttft = trace.itl_s, trace.ttft_s or 0.0
    waits = "{ttft:.2f} s to the first token, {rest:.2f} s for the {n} after it."
    lines = [say(waits, ttft=ttft, rest=sum(itl), n=len(itl))]
    what = say("the prompt") if stage == "prefill" else say("a token")
    rounds = trace.round_s
    if stage == "decode" and len(rounds) < len(itl):
        what = say("a round of {n:.1f} tokens", n=len(itl) / len(rounds)) if rounds else say("a round")
    lines.append(
        say(
            "{gflop:.3g} GFLOP and {mb:,.0f} MB for {what} in {ms:,.0f} ms: MFU {mfu:.0%}, MBU {mbu:.0%} of what "
            "{machine} does ({source}).",
            gflop=flops / 1e9,
            mb=n_bytes / 1e6,
            what=what,
            ms=took * 1e3,
            mfu=mfu,
            mbu=mbu,
            machine=machine.name,
            source=say("measured here") if machine.measured else say("data sheet"),
        )
    )
    phases = trace.stage_phases(stage)
    if phases:
        total = sum(phases.values())
        top = [f"{name} ({phases[name] / total:.0%})" for name in sorted(phases, key=lambda name: -phases[name])[:2]]
        both, one = "Most of it in {first} and {second}.", "Most of it in {first}."
        lines.append(say(both, first=top[0], second=top[1]) if len(top) == 2 else say(one, first=top[0]))
    growth = _growth(rounds)
    if stage == "decode" and growth > GROWTH:
        lines.append(say("The last tokens took {growth:.1f} times the first: the context is felt.", growth=growth))
    if machine.busy:
        lines.append(say("The ceilings were measured on a busy machine: take these shares as rough."))
    return lines


def _growth(itl: list[float]) -> float:
    n = len(itl) // 4
    return mean(itl[-n:]) / mean(itl[:n]) if n >= 2 else 1.0


def _next_steps(trace: Trace, stage: str, bound: str) -> list[NextStep]:
    """What moves this ceiling, the strongest first."""
    meta = trace.meta
    if meta.get("kv_cache") == "none" and stage == "decode":
        return [NextStep("kv-cache", "kv_cache='contiguous'")]
    packed = meta.get("weights") not in (None, *DTYPES)
    if bound == "memory":
        steps = [] if packed else [NextStep("fewer-bits", "weights='int8' or 'int4'")]
        if _growth(trace.round_s) > GROWTH:
            steps.append(NextStep("smaller-cache", "kv_cache='int8', 'int4' or 'sliding'"))
        return [*steps, NextStep("more-tokens-a-step")]
    if bound == "compute":
        steps = [NextStep("shorter-prompt")] if stage == "prefill" else []
        return [*steps, NextStep("faster-arithmetic"), NextStep("smaller-model")]
    steps = [NextStep("fused", "backend='fused'")] if meta.get("backend") == "reference" else []
    return [*steps, NextStep("share-overhead"), NextStep("idle-machine")]
