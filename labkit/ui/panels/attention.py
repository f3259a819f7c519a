"""Lesson 03, attention and FFN: whose cost grows how, counted and measured."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import plotly.graph_objects as go
import torch
from torch import Tensor

from labkit.kernels import ops
from labkit.kvcache.contiguous import ContiguousCache
from labkit.model.attention import kinds
from labkit.model.config import ModelConfig, dtype_name
from labkit.model.step import Cancelled
from labkit.perf.cost import decode_cost, prefill_cost
from labkit.perf.timer import Timer
from labkit.ui import spread, theme
from labkit.ui.controls import choice, slider
from labkit.ui.exercise import Exercise
from labkit.ui.experiment import Experiment, Result

LENGTHS = (128, 512, 1024, 2048, 3072, 4096, 6144, 8192)


# --- the crossing


def counted_share(config: ModelConfig, n_tokens: int, *, stage: str = "prefill", what: str = "flops") -> float:
    """Attention's part of attention + FFN, 0 to 1: of the FLOPs or of the bytes, in a prefill of ``n_tokens``, or in
    a decode step after as many."""
    step = (prefill_cost if stage == "prefill" else decode_cost)(config, n_tokens, dtype="bf16")
    attention, ffn = (getattr(step.phases[name], what) for name in ("attention", "ffn"))
    return attention / (attention + ffn)


def crossing(lengths: list[float], shares: list[float], level: float = 0.5) -> float | None:
    """The length at which the share first reaches ``level``, on a straight line between two measured ones; the first
    length when it is there already, None when it never is.

    >>> crossing([100.0, 200.0], [0.4, 0.6])
    150.0
    """
    if shares[0] >= level:
        return lengths[0]
    for (n0, s0), (n1, s1) in pairwise(zip(lengths, shares, strict=True)):
        if s0 < level <= s1:
            return n0 + (n1 - n0) * (level - s0) / (s1 - s0)
    return None


def counted_crossing(config: ModelConfig, **counting: Any) -> int | None:
    """The shortest length at which attention's counted share reaches one half; None when it never does."""
    low, high = 1, 2**24
    if counted_share(config, high, **counting) < 0.5:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if counted_share(config, middle, **counting) >= 0.5 else (middle + 1, high)
    return low


@torch.inference_mode()
def prefill_phases(model: Any, n_tokens: int, *, should_stop: Any) -> dict[str, float]:
    """Exclusive seconds by phase of one prefill of ``n_tokens`` in the reference backend."""
    transformer = model.transformer
    cache = ContiguousCache(transformer.cache_entries, capacity_tokens=n_tokens, device=model.device, dtype=model.dtype)
    ids = torch.arange(n_tokens, device=model.device) % (model.config.vocab_size // 2)
    timer: Any = Timer()
    if model.device.type == "cuda":
        from labkit.perf.cuda_timer import CudaTimer

        timer = CudaTimer(device=model.device)
    timer.begin_step("prefill")
    transformer(ids, cache, rows="last", timer=timer, should_stop=should_stop)
    timer.end_step()
    if model.device.type == "cuda":
        timer.finish()
    return timer.steps[0].phases


def measure_crossing(lab: Any, job: Any, *, longest: int, n_repeats: int) -> Result:
    """Prefills of doubling length; attention's share of the time beside its share of the FLOPs."""
    model = lab.model
    lengths = [n for n in LENGTHS if n <= longest]
    machine = spread.this_machine(job, model)
    times: dict[int, list[dict[str, float]]] = {n: [] for n in lengths}
    total, done = sum(lengths) * n_repeats, 0
    try:
        prefill_phases(model, 64, should_stop=lambda: job.stopped)  # wakes the threads
        for _ in range(n_repeats):
            for n in lengths:
                job.progress(done / total, f"a prompt of {n} tokens")
                times[n].append(prefill_phases(model, n, should_stop=lambda: job.stopped))
                done += n
                if any(times[n] for n in lengths[1:]):
                    job.show(_crossing_result(model, machine, times))
    except Cancelled:
        job.check()
        raise
    return _crossing_result(model, machine, times)


def ceiling_share(machine: Any, model: Any, n_tokens: int) -> float:
    """Attention's part, 0 to 1, of attention + FFN in a prefill where each takes the least time the ceilings allow."""
    step = prefill_cost(model.config, n_tokens, dtype=dtype_name(model.dtype))
    attention, ffn = (spread.least_s(machine, model, step.phases[name]) for name in ("attention", "ffn"))
    return attention / (attention + ffn)


def _crossing_result(model: Any, machine: Any, times: dict[int, list[dict[str, float]]]) -> Result:
    config = model.config
    seen = {n: _median_phases(runs) for n, runs in times.items() if runs}
    lengths = list(seen)
    share = [100 * s["attention"] / (s["attention"] + s["ffn"]) for s in seen.values()]
    bars = spread.error_bars([[100 * x for x in _shares(times[n])] for n in lengths])
    counted = [100 * counted_share(config, n) for n in lengths]
    least = [100 * ceiling_share(machine, model, n) for n in lengths]
    figure = go.Figure(
        [
            go.Scatter(x=lengths, y=share, name="measured: median and range", error_y=bars, **theme.series(0)),
            go.Scatter(x=lengths, y=counted, name="counted: of the FLOPs", **theme.series(1)),
            go.Scatter(x=lengths, y=least, name="both at this machine's ceilings", **theme.series(2)),
        ]
    )
    theme.figure_layout(figure, x="prompt tokens", y="attention's part of attention + FFN (%)")
    figure.update_xaxes(type="log", tickvals=lengths, ticktext=[f"{n:,}" for n in lengths])
    figure.add_hline(y=50, line={"color": theme.NEUTRAL, "dash": "dot"}, annotation_text="half")
    at, by_count = [float(n) for n in lengths], counted_crossing(config)
    found = crossing(at, share, 50.0)
    n_whole = min(len(times[n]) for n in lengths)
    each = [crossing(at, [100 * _shares(times[n])[i] for n in lengths], 50.0) for i in range(n_whole)]
    rows = [
        {
            "tokens": n,
            "attention ms": seen[n]["attention"] * 1e3,
            "ffn ms": seen[n]["ffn"] * 1e3,
            "repeats": len(times[n]),
            "share of time %": round(s, 1),
            "share of FLOPs %": round(c, 1),
        }
        for n, s, c in zip(lengths, share, counted, strict=True)
    ]
    where = f"nowhere up to {lengths[-1]:,} tokens"
    if found is not None:
        where = f"before **{found:,.0f} tokens**" if found == lengths[0] else f"at about **{found:,.0f} tokens**"
    summary = f"By the clock, attention overtakes the FFN {where}; by counted FLOPs at {by_count:,} tokens."
    data = {"lengths": lengths, "share": share, "counted": counted, "crossing": found, "counted_crossing": by_count}
    data["crossings"] = [x for x in each if x is not None]
    caption = "Medians of the repeats, which took turns; shares are of attention + FFN"
    return Result(figure, rows, summary, caption, mark_guess=_mark_length, data=data)


def _mark_length(figure: Any, guess: float) -> None:
    if guess >= 1:
        figure.add_vline(x=guess, line={"color": theme.VERMILION, "dash": "dash"}, annotation_text="your guess")


def _shares(runs: list[dict[str, float]]) -> list[float]:
    return [r["attention"] / (r["attention"] + r["ffn"]) for r in runs]


def _median_phases(runs: list[dict[str, float]]) -> dict[str, float]:
    middle = sorted(runs, key=lambda r: r["attention"] / r["ffn"])
    return middle[len(middle) // 2]


def panel(lab: Any, guess: Any = None) -> Experiment:
    """At what length attention overtakes the FFN."""

    def run(job: Any, **values: Any) -> Result:
        return measure_crossing(lab, job, **values)

    fields = {
        "longest": choice("Longest prompt", [(f"{n:,} tokens", n) for n in LENGTHS[2:]], 1024),
        "n_repeats": slider("Repeats", 1, 5, 3, width="180px"),
    }
    return Experiment("At what prompt length does attention overtake the FFN?", run, fields, guess=guess)


def three_crossings(config: ModelConfig) -> list[dict[str, Any]]:
    """One question, three answers: by the work of a prefill, by the work of a decode step, by its bytes."""
    return [
        {"what is counted": label, "crossing (tokens)": counted_crossing(config, stage=stage, what=what)}
        for label, stage, what in (
            ("FLOPs of a prefill", "prefill", "flops"),
            ("FLOPs of one decode step", "decode", "flops"),
            ("bytes of one decode step", "decode", "bytes"),
        )
    ]


def by_kind(config: ModelConfig, n_tokens: int = 32_768) -> list[dict[str, Any]]:
    """The same model with other attention: where the crossings would lie, and what its cache of ``n_tokens`` takes
    in bfloat16. All predicted from the config."""
    choices = {"as it is": None, "mha": "mha", "mqa": "mqa", "window of 512": kinds.Sliding(512)}
    rows = []
    for name, kind in choices.items():
        other = config if kind is None else kinds.with_attention(config, kind)
        at = [row["crossing (tokens)"] for row in three_crossings(other)]
        step = decode_cost(other, n_tokens, dtype="bf16")
        rows.append(
            {
                "attention": name,
                "FLOPs cross, prefill": "never" if at[0] is None else f"{at[0]:,}",
                "bytes cross, decode": "never" if at[2] is None else f"{at[2]:,}",
                f"cache read at {n_tokens:,} tokens, MB": round(step.total.kv_read_bytes / 1e6, 1),
            }
        )
    return rows


# --- the exercise


def _one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """labkit's own attention of one head over a whole prompt."""
    scale = q.shape[-1] ** -0.5
    return ops.attend(q[:, None], k[None], v[None], n_past=0, scale=scale)[:, 0]


def _case(n: int, d: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, n, d, generator=torch.Generator().manual_seed(seed))
    return q, k, v


ONE_HEAD = Exercise(
    "attention of one head",
    cases=[_case(1, 4, 0), _case(5, 8, 1), _case(12, 64, 2)],
    oracle=_one_head,
    hints=(
        "Three steps: scores `q @ k.T` divided by the square root of D; hide the future; softmax and `@ v`.",
        "Hide the future with `scores.masked_fill(~torch.ones_like(scores, dtype=bool).tril(), -math.inf)`.",
        "`return scores.masked_fill(...).softmax(-1) @ v`, where scores is `q @ k.T / math.sqrt(q.shape[-1])`.",
    ),
)

QUIZ = (
    (
        "A chat of 200 tokens is too slow. Would a faster attention kernel help much?",
        {
            "Hardly": "Right: at this length most of a layer's work is the FFN and attention's own projections.",
            "Yes, attention is quadratic": "Quadratic, but with a small factor. At 200 tokens it is far below the FFN.",
        },
        "Hardly",
    ),
    (
        "Why does the clock see attention overtake the FFN earlier than a count of FLOPs does?",
        {
            "Its FLOPs run slower": "Yes: small products, a softmax and a mask stay further below the peak.",
            "The count is wrong": "The count is exact. It only takes all operations to be equally fast.",
            "The FFN is skipped": "No: every token goes through every FFN.",
        },
        "Its FLOPs run slower",
    ),
    (
        "GQA with 3 key/value heads instead of 9: what becomes three times smaller?",
        {
            "The scores' FLOPs": "No: nine query heads still compare with everything.",
            "The KV cache": "Yes, and with it the bytes that a decode step must read.",
            "The FFN": "No: attention's kind leaves the FFN alone.",
        },
        "The KV cache",
    ),
)
