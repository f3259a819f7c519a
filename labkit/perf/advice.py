"""What would help? Every switch that this machine has, its predicted effect on a run, the best first.

Each switch is forecast like any other run: its engine's rates are measured on stand-ins once (a few seconds) and kept.
There are many engines and a reader waits, so the promising ones are measured first, while the time lasts; the others
are estimated from bytes and FLOPs, say so, and are measured when somebody asks again. Nothing is assumed about a switch
from its name; one that makes a run slower says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from labkit import registry
from labkit.kvcache.sliding import Sliding
from labkit.model.config import DTYPES, ModelConfig
from labkit.perf import formats, hardware
from labkit.perf import rates as rates_module
from labkit.perf.drafting import Outlook, drafted
from labkit.perf.forecast import Estimate, Forecast, StageForecast, forecast
from labkit.perf.machine import Machine
from labkit.perf.probe import Engine
from labkit.quant import form_of, format_of

GOALS = {
    "wall": "the whole run",
    "ttft": "time to first token",
    "itl": "time between tokens",
    "memory": "memory",
}
Progress = Callable[[float, str], None]
BUDGET_S = 10.0
"""How long one question may go on measuring engines that are not known yet."""
UNSURE = 0.5
"""Half-width of an estimate's interval: it takes the engine to be as near its floor as the present one is."""


@dataclass(frozen=True)
class Switch:
    """One change, and what the run would be with it."""

    changes: dict[str, Any]
    """Keyword -> value: dtype and weights for ``load``, kv_cache, backend and drafter for ``Pipeline``."""
    forecast: Forecast
    gains: dict[str, float]
    """Goal -> how many times better than now: 2.0 halves it, 0.5 doubles it."""
    lossless: bool
    measured: bool = True
    """False: estimated from bytes and FLOPs; its engine has not been measured yet."""

    @property
    def label(self) -> str:
        return ", ".join(f"{name}={_name(value)!r}" for name, value in self.changes.items())

    @property
    def basis(self) -> str:
        """What the forecast stands on."""
        if "drafter" in self.changes:
            return "measured rates, and its guesses at this answer"
        return "measured rates" if self.measured else "bytes and FLOPs only"

    @property
    def reloads(self) -> bool:
        """Whether the weights have to be loaded again."""
        return bool({"dtype", "weights"} & set(self.changes))


@dataclass(frozen=True)
class Advice:
    """The run as it is, every switch ranked, and those that do not work here with the reason."""

    goal: str
    now: Forecast
    switches: tuple[Switch, ...]
    unavailable: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Switch | None:
        """The first measured one that helps by more than the forecast can be wrong; None when nothing does."""
        return next((s for s in self.switches if s.measured and s.gains[self.goal] > 1.1), None)

    def rows(self) -> list[dict[str, Any]]:
        """A table: one row a switch, ``now`` first."""
        rows = [_row("as it is", self.now, None)]
        return rows + [_row(switch.label, switch.forecast, switch) for switch in self.switches]


def what_would_help(
    config: ModelConfig,
    engine: Engine,
    *,
    n_prompt_tokens: int,
    n_new_tokens: int = 64,
    goal: str = "wall",
    machine: Machine | None = None,
    outlooks: Sequence[Outlook] = (),
    progress: Progress | None = None,
    budget_s: float = BUDGET_S,
) -> Advice:
    """Forecast the run under each other switch, and under the best of each kind together.

    goal      wall (the whole run), ttft, itl or memory: what the ranking is by
    outlooks  what drafters would have guessed of this run's text; without them no drafter is forecast

    A call measures engines that are not known yet for ``budget_s`` seconds, the most promising first (``progress`` says
    which), and estimates the rest; another call goes on where it ended. Raises ValueError for an unknown goal.
    """
    if goal not in GOALS:
        raise ValueError(f"unknown goal {goal!r}: choose one of {', '.join(GOALS)}.")
    say = progress or (lambda share, what: None)
    machine = machine or hardware.machine(engine.device, progress=say)
    counts = {"n_prompt_tokens": n_prompt_tokens, "n_new_tokens": n_new_tokens, "machine": machine}
    now = forecast(config, engine, **counts)
    rough = forecast(config, engine, **counts, estimate=True)
    found: list[Switch] = []
    unavailable: dict[str, str] = {}

    def switch(changes: dict[str, Any], then: Forecast, *, measured: bool) -> Switch:
        gains = {name: _measure(now, name) / max(_measure(then, name), 1e-12) for name in GOALS}
        lossless = _is_lossless(engine, changes, n_prompt_tokens + n_new_tokens)
        return Switch(changes, then, gains, lossless, measured)

    def add(changes: dict[str, Any]) -> None:
        then, reason = _try(config, _engines(engine, changes), counts)
        if then is None:
            unavailable[_label(changes)] = reason
        else:
            found.append(switch(changes, then, measured=True))

    def estimate(changes: dict[str, Any]) -> Switch:
        then = forecast(config, replace(engine, **changes), **counts, estimate=True)
        return switch(changes, _as_near(now, rough, then), measured=False)

    def known(changes: dict[str, Any]) -> bool:
        return not machine.measured or rates_module.is_measured(config, _engines(engine, changes)[0])

    candidates = list(_single_switches(engine))
    for changes in filter(known, candidates):
        add(changes)
    open_ = sorted((estimate(changes) for changes in candidates if not known(changes)), key=lambda s: -s.gains[goal])
    began, longest = time.perf_counter(), 0.0
    for guess in open_:
        start = time.perf_counter()
        if start - began + longest > budget_s:
            found.append(guess)
            continue
        say(min(1.0, (start - began) / budget_s), f"measuring {guess.label}")
        add(guess.changes)
        longest = max(longest, time.perf_counter() - start)
    together = _best_of_each_kind(found, goal)
    if outlooks and machine.measured:
        rates = rates_module.rates(config, engine)
        for name in dict.fromkeys(outlook.drafter for outlook in outlooks):
            then = drafted(config, now, rates, [outlook for outlook in outlooks if outlook.drafter == name])
            found.append(switch({"drafter": name}, then, measured=True))
    if len(together) > 1:
        say(1.0, f"forecasting {_label(together)}")
        if known(together) or time.perf_counter() - began + longest <= budget_s:
            add(together)
        else:
            found.append(estimate(together))
    return Advice(goal, now, tuple(sorted(found, key=lambda s: -s.gains[goal])), unavailable)


def _as_near(now: Forecast, rough: Forecast, then: Forecast) -> Forecast:
    """The floors of ``then``, taken to be missed by as much as the present engine misses its own."""

    def stage(measured: StageForecast, floor: StageForecast, other: StageForecast) -> StageForecast:
        value = other.time.value * measured.time.value / floor.time.value
        return replace(other, time=Estimate(value, value * (1 - UNSURE), value * (1 + UNSURE)))

    prefill = stage(now.prefill, rough.prefill, then.prefill)
    return replace(then, prefill=prefill, decode=stage(now.decode, rough.decode, then.decode))


def _engines(engine: Engine, changes: dict[str, Any]) -> list[Engine]:
    """What would run: the engine with the changes; the reference when the backend refuses them and may be left."""
    other = replace(engine, **changes)
    return [other] if "backend" in changes else [other, replace(other, backend="reference")]


def _try(config: ModelConfig, engines: list[Engine], counts: dict[str, Any]) -> tuple[Forecast | None, str]:
    """The first engine's forecast that there is, or why there is none."""
    reason = ""
    for engine in engines:
        try:
            return forecast(config, engine, **counts), ""
        except (RuntimeError, ValueError) as error:
            reason = reason or str(error)
    return None, reason


def _single_switches(engine: Engine) -> Iterator[dict[str, Any]]:
    """Every value of every switch but the present one."""
    for dtype in DTYPES:
        if dtype != engine.dtype:
            yield {"dtype": dtype}
    for kind in ("weights", "kv_cache", "backend"):
        for info in registry.components(kind):
            if info.unavailable or info.name == _name(getattr(engine, kind)):
                continue
            if kind == "weights" and not _is_a_switch(info.name, engine):
                continue
            yield {kind: info.name}


def _is_a_switch(name: str, engine: Engine) -> bool:
    """Whether another format would change this engine's bytes. What only a file decides is none, nor is what a
    calibration chooses: its bytes and its time are those of the plain format of the same name."""
    config = format_of(name)
    if getattr(config, "from_file", False) or getattr(config, "calibrates", False):
        return False
    return form_of(name) != form_of(engine.weights)


def _best_of_each_kind(found: list[Switch], goal: str) -> dict[str, Any]:
    best: dict[str, tuple[float, Any]] = {}
    for switch in found:
        ((name, value),) = switch.changes.items()
        gain = switch.gains[goal]
        if gain > 1.05 and gain > best.get(name, (0.0, None))[0]:
            best[name] = (gain, value)
    return {name: value for name, (_, value) in best.items()}


def _measure(found: Forecast, goal: str) -> float:
    if goal == "ttft":
        return found.ttft.value
    if goal == "itl":
        return found.itl.value
    if goal == "memory":
        return found.memory.total_bytes
    return found.ttft.value + (found.n_new_tokens - 1) * found.itl.value


def _is_lossless(engine: Engine, changes: dict[str, Any], n_tokens: int) -> bool:
    """Same tokens as before, up to rounding: packed weights, packed caches and a cache that forgets are not."""
    kind, options = formats.cache_class(changes.get("kv_cache", engine.kv_cache))
    forgets = isinstance(options, Sliding) and 0 < options.window < n_tokens
    same_or_wider = changes.get("dtype", engine.dtype) in (engine.dtype, "fp32")
    return _same_values(engine, changes) and bool(kind.lossless) and not forgets and same_or_wider


def _same_values(engine: Engine, changes: dict[str, Any]) -> bool:
    """Whether the weights stay the same numbers: untouched, or a file's own blocks unpacked."""
    if "weights" not in changes:
        return True
    packed_by_file = engine.weights is not None and getattr(format_of(engine.weights), "from_file", False)
    return packed_by_file and form_of(changes["weights"]) is None


def _row(label: str, found: Forecast, switch: Switch | None) -> dict[str, Any]:
    wall = _measure(found, "wall")
    return {
        "switch": label,
        "TTFT ms": found.ttft.value * 1e3,
        "ITL ms": found.itl.value * 1e3,
        "whole run s": wall,
        "memory MB": found.memory.total_bytes / 1e6,
        "times faster": switch.gains["wall"] if switch else 1.0,
        "tokens": "as now" if switch is None or switch.lossless else "may change",
        "from": switch.basis if switch else "measured rates",
    }


def _label(changes: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_name(value)!r}" for name, value in changes.items())


def _name(choice: Any) -> Any:
    return choice if isinstance(choice, str) or choice is None else type(choice).__name__.lower()
