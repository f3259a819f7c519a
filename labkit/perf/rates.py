"""From the stand-ins' times to the rates that a forecast needs: overhead, seconds a weight, a FLOP, a byte.

Nothing here looks at the model that is forecast but for its *shell*, from which the overhead is read. The
equations, for a phase of one layer with R tokens together::

    ffn        = overhead + weights * s_weight(R)
    attention  = overhead + weights * s_weight(R) + R * d_q * s_rotary + score FLOPs * s_flop      (prefill)
    attention  = overhead + weights * s_weight(1) + cache bytes * s_byte                           (decode)

``s_weight`` holds both sides of the roofline: at R = 1 it is bytes / bandwidth, at large R it is 2R / rate.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from math import exp, log
from typing import Any

import torch

from labkit.model.config import ModelConfig
from labkit.perf.busy import BusyWatch, busy_now
from labkit.perf.cost import StepCost, step_cost
from labkit.perf.device import device_name
from labkit.perf.formats import timed_form
from labkit.perf.machine import BUSY_SHARE, Rate
from labkit.perf.probe import FAR_TOKENS, Bench, Engine, Point, plan, run_plan, stand_ins, sweep_bytes, widths
from labkit.resources import cache_folder

VERSION = 2
"""Of the file format and of the equations: a change re-measures."""
ZERO = Rate.exactly(0.0)


@dataclass(frozen=True)
class Rates:
    """Measured on stand-ins, for one engine. Seconds, each with its spread."""

    overhead_s: dict[str, Rate]
    """By phase: of one layer (attention, ffn, kv_cache, norm: two of them), of one step (embed, lm_head, schedule)."""
    sequence_s: Rate
    """What each further sequence of a batch adds to a layer."""
    weight_s: dict[int, dict[int, Rate]]
    """Seconds a weight in the layers' products: {width: {tokens together: s}}."""
    head_s: dict[int, Rate]
    """Seconds a weight of the head for one token: {width: s}."""
    norm_s: Rate
    """Seconds a value of one norm."""
    rotary_s: Rate
    """Seconds a query value: rotary, reshaping, and what the attention's smaller products lose."""
    score_flop_s: Rate
    """Seconds a FLOP of causal attention."""
    chunk_flop_s: Rate
    """The same for a chunk with a past: masked, so the full square is computed."""
    kv_byte_s: Rate
    """Seconds a cached byte that a decode step reads."""
    kv_write_s: Rate
    """Seconds a byte appended, memory touched for the first time."""
    measured_at: str = ""
    busy_share: float = 0.0
    n_heads_together: int = 2
    """Key heads of the stand-in that ``kv_byte_s`` comes from: what threads could share."""
    missing: tuple[str, ...] = field(default_factory=tuple)
    """What this engine could not run at all."""

    def weight(self, width: int, n_rows: float) -> Rate:
        """Seconds a weight for ``n_rows`` tokens together in a model ``width`` wide: interpolated, both logarithmic."""
        by_width = {w: _between(n_rows, rates) for w, rates in self.weight_s.items() if rates}
        return _between(width, by_width)

    def head(self, width: int) -> Rate:
        return _between(width, self.head_s)

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Rates:
        """Raises ValueError for anything else than what ``to_json`` wrote in this version."""
        try:
            data = json.loads(text)
            if data.pop("version") != VERSION:
                raise ValueError("another version")
            for name, value in data.items():
                if name == "overhead_s":
                    data[name] = {k: Rate(**v) for k, v in value.items()}
                elif name == "head_s":
                    data[name] = {int(k): Rate(**v) for k, v in value.items()}
                elif name == "weight_s":
                    data[name] = {int(w): {int(n): Rate(**v) for n, v in by.items()} for w, by in value.items()}
                elif isinstance(value, dict):
                    data[name] = Rate(**value)
            return cls(**{**data, "missing": tuple(data["missing"])})
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"not measured rates: {error!r}") from error


def rates(
    config: ModelConfig,
    engine: Engine,
    *,
    refresh: bool = False,
    progress: Callable[[float, str], None] | None = None,
) -> Rates:
    """The rates of ``engine`` here, for models built like ``config``: measured once (a few seconds), then cached.

    Raises RuntimeError when the engine cannot run (its backend refuses the weights, the cache or the device).
    """
    engine = timed_form(engine)
    path = _cache_path(config, engine)
    if not refresh and path.is_file():
        try:
            kept = Rates.from_json(path.read_text(encoding="utf-8"))
            if kept.busy_share <= BUSY_SHARE or busy_now() > BUSY_SHARE:
                return kept  # else it was measured in a storm that is over: measure again
        except (OSError, ValueError):
            pass  # an older labkit's, or damaged: measure again
    found = measure(config, engine, progress=progress)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found.to_json(), encoding="utf-8")
    except OSError:
        pass
    return found


def is_measured(config: ModelConfig, engine: Engine) -> bool:
    """Whether ``rates(config, engine)`` would answer at once."""
    return _cache_path(config, timed_form(engine)).is_file()


def measure(config: ModelConfig, engine: Engine, *, progress: Callable[[float, str], None] | None = None) -> Rates:
    """Measure now."""
    say = progress or (lambda share, what: None)
    models = stand_ins(config, engine.device)
    swept = sweep_bytes(config, engine)
    benches = {n: (lambda n=n, c=c: Bench(c, engine, sweep_bytes=swept * (n == "shell"))) for n, c in models.items()}
    points = plan(engine.device)
    with BusyWatch() as watch:
        try:
            samples = dict(run_plan(benches, points, progress=say))
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise RuntimeError(f"{engine.label()} does not run here: {error}") from error
    say(1.0, "done")
    return _derive(models, engine, samples, watch.share)


def _derive(
    models: dict[str, ModelConfig], engine: Engine, samples: dict[Point, list[dict[str, float]]], busy: float
) -> Rates:
    """The equations of the module's first page, solved phase by phase."""
    times = {p: {k: Rate.of([s.get(k, 0.0) for s in runs]) for k in runs[0]} for p, runs in samples.items()}
    shell, n_shell = times[Point("shell", 1)], models["shell"].n_layers
    overhead = {name: _scaled(shell.get(name, ZERO), 1 / n_shell) for name in ("attention", "ffn", "norm", "kv_cache")}
    overhead |= {name: shell.get(name, ZERO) for name in ("embed", "lm_head")}
    one = times[Point("narrow", 1)]  # the shell's own total includes the sweeps
    named = sum(rate.value for name, rate in one.items() if name not in ("step", "schedule"))
    overhead["schedule"] = Rate.exactly(max(0.0, one["step"].value - named))

    costs = {p: _cost(models[p.model], p, engine) for p in times}
    width_of = widths(engine.device)

    def beyond(point: Point, phase: str, per: float, *, known: float = 0.0) -> Rate:
        """(time of the phase - its overhead - what is known) per unit, not below a tenth of the unexplained time."""
        n = models[point.model].n_layers if phase in ("attention", "ffn", "norm", "kv_cache") else 1
        fixed = (0.0 if engine.device == "cuda" else overhead[phase].value * n) + known
        return _minus(times[point].get(phase, ZERO), fixed, per)

    weight_s: dict[int, dict[int, Rate]] = {}
    head_s: dict[int, Rate] = {}
    for name, width in width_of.items():
        mine = [p for p in times if p.model == name and p.n_past == 0]
        weight_s[width] = {p.n_rows: beyond(p, "ffn", costs[p].phases["ffn"].n_weights) for p in mine}
        head_s[width] = beyond(Point(name, 1), "lm_head", costs[Point(name, 1)].phases["lm_head"].n_weights)

    longest = max((p for p in times if p.model == "narrow" and p.n_past == 0), key=lambda p: p.n_new)
    short = max((p for p in times if p.model == "narrow" and p.n_past == 0 and p != longest), key=lambda p: p.n_new)
    narrow = models["narrow"]
    d_q, width, n = narrow.n_heads * narrow.d_head, width_of["narrow"], narrow.n_layers

    def linears(point: Point) -> float:
        return costs[point].phases["attention"].n_weights * weight_s[width][point.n_rows].value

    score_flop_s, rotary_s = _attention_rates(
        {p: beyond(p, "attention", 1.0, known=linears(p)) for p in (short, longest)},
        {p: costs[p].phases["attention"].attention_flops for p in (short, longest)},
        {p: p.n_new * d_q * n for p in (short, longest)},
        like=_scaled(weight_s[width][longest.n_rows], 0.5 / longest.n_rows),
    )
    chunk, chunk_flop_s = Point("narrow", 256, 768), score_flop_s
    if chunk in times and short.n_new == chunk.n_new:
        square = step_cost(narrow, n_new=256, n_past=768, full_square=True).phases["attention"].attention_flops
        chunk_flop_s = beyond(chunk, "attention", square, known=linears(short) + rotary_s.value * short.n_new * d_q * n)

    far, near = Point("narrow", 1, FAR_TOKENS), Point("narrow", 1)
    kv_bytes = costs[far].phases["attention"].kv_read_bytes - costs[near].phases["attention"].kv_read_bytes
    kv_byte_s = ZERO
    if kv_bytes > 0:
        kv_byte_s = _minus(times[far]["attention"], times[near]["attention"].value, kv_bytes)
    two, four = (_named(times[Point("shell", 1, 8, n_sequences)]) for n_sequences in (2, 4))
    sequence_s = _minus(four, two.value, 2 * n_shell)
    written = costs[longest].phases["kv_cache"].kv_write_bytes
    return Rates(
        overhead_s=overhead,
        sequence_s=sequence_s,
        weight_s=weight_s,
        head_s=head_s,
        norm_s=beyond(longest, "norm", 2 * n * longest.n_new * narrow.d_model),
        rotary_s=rotary_s,
        score_flop_s=score_flop_s,
        chunk_flop_s=chunk_flop_s,
        kv_byte_s=kv_byte_s,
        kv_write_s=beyond(longest, "kv_cache", written) if written else ZERO,
        measured_at=datetime.now().isoformat(timespec="seconds"),
        busy_share=busy,
        n_heads_together=narrow.n_kv_heads,
    )


def _attention_rates(
    left: dict[Point, Rate], flops: dict[Point, float], per_token: dict[Point, float], *, like: Rate
) -> tuple[Rate, Rate]:
    """Two prompt lengths, two unknowns: what grows with the tokens' square (seconds a FLOP), and what with the tokens.

    ``like``, seconds a FLOP of the linear layers, stands in when both lengths are too short to tell them apart (a
    machine so busy that longer ones were left out), and bounds what noise can make of the difference.
    """
    short, long = sorted(left, key=lambda p: p.n_new)
    if short.n_new < 64:
        return like, Rate.exactly(0.0)
    determinant = flops[long] * per_token[short] - flops[short] * per_token[long]
    score = (left[long].value * per_token[short] - left[short].value * per_token[long]) / determinant
    score = min(max(score, 0.1 * left[long].value / flops[long]), left[long].value / flops[long], 20 * like.value)
    rotary = max(0.0, (left[short].value - score * flops[short]) / per_token[short])
    return _like(left[long], score), _like(left[short], rotary)


def _cost(config: ModelConfig, point: Point, engine: Engine) -> StepCost:
    setting: dict[str, Any] = {"dtype": engine.dtype, "weights": engine.weights, "kv_cache": engine.kv_cache}
    return step_cost(config, n_new=point.n_new, n_past=point.n_past, n_sequences=point.n_sequences, **setting)


def _named(times: dict[str, Rate]) -> Rate:
    """All phases together."""
    found = [rate for name, rate in times.items() if name != "step"]
    value, low, high = (sum(getattr(rate, end) for rate in found) for end in ("value", "low", "high"))
    return Rate(value, low, high, found[0].n)


def _minus(rate: Rate, fixed: float, per: float) -> Rate:
    """(rate - fixed) / per, kept positive: noise may not turn a cost into a gift."""
    floor = 0.1 * rate.value
    low, value, high = (max(t - fixed, floor) / per for t in (rate.low, rate.value, rate.high))
    return Rate(value, low, high, rate.n)


def _scaled(rate: Rate, by: float) -> Rate:
    return Rate(rate.value * by, rate.low * by, rate.high * by, rate.n)


def _like(rate: Rate, value: float) -> Rate:
    """``value`` with ``rate``'s relative spread."""
    by = value / rate.value if rate.value else 0.0
    return _scaled(rate, by) if by else Rate.exactly(value)


def _between(at: float, table: dict[int, Rate]) -> Rate:
    """Log-log interpolation in a table of rates; the ends go on flat."""
    keys = sorted(table)
    if at <= keys[0] or len(keys) == 1:
        return table[keys[0]]
    if at >= keys[-1]:
        return table[keys[-1]]
    high = next(k for k in keys if k >= at)
    low = keys[keys.index(high) - 1]
    share = (log(at) - log(low)) / (log(high) - log(low))
    a, b = table[low], table[high]

    def mix(x: float, y: float) -> float:
        return exp(log(x) * (1 - share) + log(y) * share) if x > 0 and y > 0 else x + (y - x) * share

    return Rate(mix(a.value, b.value), mix(a.low, b.low), mix(a.high, b.high), min(a.n, b.n))


def _cache_path(config: ModelConfig, engine: Engine) -> Any:
    key = f"{VERSION}|{device_name(engine.device)}|{torch.get_num_threads()}|{torch.__version__}"
    key += f"|{engine.label()}|{stand_ins(config, engine.device)}|{sweep_bytes(config, engine)}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return cache_folder() / "hardware" / f"rates-{digest}.json"
