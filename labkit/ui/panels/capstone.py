"""Lesson 14, the capstone: a budget made from what this machine can do, and the switches to meet it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import median
from typing import Any

import plotly.graph_objects as go

import labkit
from labkit.perf.busy import BusyWatch
from labkit.perf.machine import BUSY_SHARE
from labkit.prompts import ready_prompts
from labkit.ui import theme
from labkit.ui.controls import choice
from labkit.ui.exercise import Exercise
from labkit.ui.experiment import Experiment, Result
from labkit.ui.session import shelf

TURNS = 3
N_TOKENS = 24
PLAIN = "plain"
DTYPE = "bf16"
"""Of everything that is not packed: in 32 bits two forms of the model would not fit a small machine."""
TRIED = ("stored", "int8", "int4")
"""Weights that the search for a budget tries, beside unpacked ones."""
MARGIN = 1.2
"""How far above the best setting's own first token the budget lies: a little more than this machine's noise."""
SHORT, LONG = "a short text", "a long letter"
LONG_CHARACTERS = 1600
"""Of the letter: long enough that reading it is most of the wait, short enough for a slow machine."""
LINES = {"first token, ms": "ttft_ms", "time per token, ms": "itl_ms", "memory, MB": "memory_mb"}


@dataclass(frozen=True)
class Setting:
    """One way to run, measured in several turns."""

    weights: str
    kv_cache: str
    ttft_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]
    memory_mb: tuple[float, ...]
    """Weights and cache, exact; the same in each turn."""

    def figures(self) -> dict[str, float]:
        """The medians, by budget line."""
        return {line: median(getattr(self, name)) for line, name in LINES.items()}


def prompts() -> dict[str, str]:
    """The two requests: short to read, and long to read."""
    texts = {prompt.name: prompt.text for prompt in ready_prompts()}
    return {SHORT: texts["story"], LONG: max(texts.values(), key=len)[:LONG_CHARACTERS]}


def try_setting(job: Any, *, weights: str, kv_cache: str, request: str, turns: int = TURNS) -> Setting:
    """Run the request ``turns`` times; the first run, which warms up, is not counted."""
    job.progress(-1, f"loading: weights {weights}")
    model = shelf.get(dtype=DTYPE, weights=weights)
    pipeline = labkit.Pipeline(model, kv_cache=kv_cache)
    ttft, itl, memory = [], [], []
    for turn in range(turns + 1):
        job.progress(turn / (turns + 1), f"weights {weights}, cache {kv_cache}: run {turn + 1} of {turns + 1}")
        trace = pipeline.generate(prompts()[request], max_new_tokens=N_TOKENS, ignore_eos=True).trace
        if turn:
            ttft.append((trace.ttft_s or 0.0) * 1e3)
            itl.append(median(trace.itl_s) * 1e3)
            memory.append((model.nbytes + trace.meta["kv_cache_bytes"]) / 1e6)
    return Setting(weights, kv_cache, tuple(ttft), tuple(itl), tuple(memory))


def budget_of(settings: Mapping[str, Setting]) -> dict[str, float]:
    """A budget that the fastest setting meets and unpacked weights need not: half way between them, on a log scale.

    Feasible by construction: it is made from what was measured here."""
    plain = settings[PLAIN].figures()
    best = min(settings.values(), key=lambda setting: setting.figures()["time per token, ms"]).figures()
    between = {line: sqrt(plain[line] * best[line]) for line in LINES}
    return between | {"first token, ms": MARGIN * best["first token, ms"]}


def verdicts(setting: Setting, budget: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row a budget line: what is allowed, what was measured, whether the median is within it."""
    rows = []
    for line, name in LINES.items():
        turns = getattr(setting, name)
        rows.append(
            {
                "line": line,
                "allowed": budget[line],
                "yours, median": median(turns),
                "lowest": min(turns),
                "highest": max(turns),
                "met": "yes" if median(turns) <= budget[line] else "no",
            }
        )
    return rows


def measure_budget(lab: Any, job: Any) -> Result:
    """What is possible here: unpacked weights and each packed form of them, one after the other."""
    known = {info.name for info in labkit.components("weights") if info.unavailable is None}
    names = [PLAIN, *(name for name in TRIED if name in known)]
    with BusyWatch() as watch:
        settings = {name: try_setting(job, weights=name, kv_cache="contiguous", request=SHORT) for name in names}
    budget = budget_of(settings)
    found = {name: setting.figures() for name, setting in settings.items()}
    speed = {name: 1e3 / figures["time per token, ms"] for name, figures in found.items()}
    figure = go.Figure()
    for idx, name in enumerate(names):
        turns = settings[name].itl_ms
        bar = {"type": "data", "symmetric": False, "array": [max(turns) - median(turns)]}
        bar["arrayminus"] = [median(turns) - min(turns)]
        look = {"color": theme.COLORS[idx % len(theme.COLORS)], "pattern": {"shape": ("", "/", ".")[idx % 3]}}
        figure.add_bar(y=[name], x=[median(turns)], error_x=bar, orientation="h", name=name, marker=look)
    theme.figure_layout(figure, x="time per token, ms (median and range)", y="", height=300)
    figure.update_layout(showlegend=False, margin={"l": 90})
    line = {"color": theme.NEUTRAL, "dash": "dot"}
    figure.add_vline(x=budget["time per token, ms"], line=line, annotation_text="budget")
    gain = found[PLAIN]["time per token, ms"] / min(f["time per token, ms"] for f in found.values())
    words = ", ".join(f"{line} at most **{value:,.0f}**" for line, value in budget.items())
    summary = f"Your budget, made from these runs: {words}."
    if watch.share > BUSY_SHARE:
        summary += " Other programs were busy meanwhile: run it again when they are done."
    rows = [{"weights": name, **found[name], "tok/s": speed[name]} for name in names]
    data = {"budget": budget, "gain": gain, "figures": found}
    return Result(
        figure, rows, summary, "Measured just now in 16-bit numbers (bf16), contiguous cache, medians of 3", data=data
    )


def budget_panel(lab: Any, guess: Any = None) -> Experiment:
    """Finds out what this machine can do, and sets the budget."""

    def run(job: Any) -> Result:
        return measure_budget(lab, job)

    return Experiment("What is possible on this machine?", run, {}, guess=guess)


def measure_try(job: Any, budget: Mapping[str, float], **values: Any) -> Result:
    """The learner's setting against the budget."""
    setting = try_setting(job, **values)
    rows = verdicts(setting, budget)
    share = [100 * row["yours, median"] / row["allowed"] for row in rows]
    over = [row["line"] for row in rows if row["met"] == "no"]
    colors = [theme.VERMILION if value > 100 else theme.BLUE for value in share]
    shapes = ["/" if value > 100 else "" for value in share]
    spread = {
        "type": "data",
        "symmetric": False,
        "array": [100 * (row["highest"] - row["yours, median"]) / row["allowed"] for row in rows],
        "arrayminus": [100 * (row["yours, median"] - row["lowest"]) / row["allowed"] for row in rows],
    }
    bars = go.Bar(
        y=[row["line"] for row in rows],
        x=share,
        error_x=spread,
        orientation="h",
        text=[f"{value:.0f} %" for value in share],
        textposition="inside",
        marker={"color": colors, "pattern": {"shape": shapes}},
    )
    figure = theme.figure_layout(go.Figure(bars), x="per cent of what is allowed (striped: too much)", y="", height=300)
    figure.update_layout(margin={"l": 130})
    figure.add_vline(x=100, line={"color": theme.NEUTRAL, "dash": "dash"}, annotation_text="allowed")
    if over:
        summary = f"Not yet: {', '.join(over)} {'is' if len(over) == 1 else 'are'} over the budget."
    else:
        summary = f"**Met**, all three lines: weights {setting.weights}, cache {setting.kv_cache}."
    return Result(figure, rows, summary, "Medians of 3 runs", data={"met": not over, "rows": rows, "over": over})


def try_panel(budget: Mapping[str, float]) -> Experiment:
    """Choose the switches, run, and see the three lines."""

    def run(job: Any, **values: Any) -> Result:
        return measure_try(job, budget, **values)

    def names(kind: str) -> list[str]:
        return [info.name for info in labkit.components(kind) if info.unavailable is None]

    known = [PLAIN, *(name for name in names("weights") if name in {*TRIED, "w8a8"})]
    fields = {
        "weights": choice("Weights", known, PLAIN),
        "kv_cache": choice("KV cache", names("kv_cache"), "none"),
        "request": choice("Request", [SHORT, LONG], SHORT),
    }
    return Experiment("Does your setting meet the budget?", run, fields, confounders=("request",))


def two_requests(job: Any = None, names: tuple[str, ...] = (PLAIN, "stored")) -> list[dict[str, Any]]:
    """The same two settings on a short and on a long request: what each is worth where most of the wait is reading."""
    rows = []
    for weights in names:
        row: dict[str, Any] = {"weights": weights}
        for request in (SHORT, LONG):
            found = try_setting(job or _Quiet(), weights=weights, kv_cache="contiguous", request=request).figures()
            row[f"{request}: first token, ms"] = found["first token, ms"]
            row[f"{request}: per token, ms"] = found["time per token, ms"]
        rows.append(row)
    return rows


def where_it_helps(rows: list[dict[str, Any]]) -> str:
    """What narrower weights did to each of the four figures, in words."""
    plain, other = rows
    said = []
    for column in list(plain)[1:]:
        ratio = plain[column] / other[column]
        word = "no difference" if 1 / 1.1 < ratio < 1.1 else f"{max(ratio, 1 / ratio):.1f} times "
        said.append(f"{column.removesuffix(', ms')}: {word}{'' if word[0] == 'n' else 'less' if ratio > 1 else 'more'}")
    return f"**{other['weights']}** against **{plain['weights']}**. " + "; ".join(said) + "."


class _Quiet:
    """A job that nobody watches."""

    def progress(self, fraction: float, message: str = "") -> None:
        pass


# --- the exercise


def _cheapest(settings: list[dict[str, Any]], budget: dict[str, float]) -> str | None:
    """By labkit's own verdicts: the name of the smallest setting within all three lines; None when there is none."""
    fitting = []
    for setting in settings:
        one = Setting("", "", (setting["ttft_ms"],), (setting["itl_ms"],), (setting["memory_mb"],))
        if all(row["met"] == "yes" for row in verdicts(one, dict(zip(LINES, budget.values(), strict=True)))):
            fitting.append(setting)
    return min(fitting, key=lambda setting: setting["memory_mb"])["name"] if fitting else None


_SETTINGS = [
    {"name": "plain", "ttft_ms": 90.0, "itl_ms": 40.0, "memory_mb": 540.0},
    {"name": "int8", "ttft_ms": 60.0, "itl_ms": 11.0, "memory_mb": 150.0},
    {"name": "int4", "ttft_ms": 70.0, "itl_ms": 7.0, "memory_mb": 95.0},
]
CHEAPEST = Exercise(
    "the smallest setting that fits",
    cases=[
        (_SETTINGS, {"ttft_ms": 100.0, "itl_ms": 50.0, "memory_mb": 600.0}),
        (_SETTINGS, {"ttft_ms": 65.0, "itl_ms": 12.0, "memory_mb": 200.0}),
        (_SETTINGS, {"ttft_ms": 50.0, "itl_ms": 12.0, "memory_mb": 200.0}),
        (_SETTINGS, {"ttft_ms": 70.0, "itl_ms": 7.0, "memory_mb": 95.0}),
    ],
    oracle=_cheapest,
    hints=(
        "A setting fits when none of its three figures is above the budget's figure of the same name.",
        "`all(setting[line] <= budget[line] for line in budget)` is the test of one setting.",
        "Of those that fit take `min(fitting, key=lambda s: s['memory_mb'])['name']`; return None when none does.",
    ),
)

QUIZ = (
    (
        "A chat feels slow: the first word comes at once, the rest crawls. What do you look at first?",
        {
            "The bytes read for each token": "Decode reads the weights and the cache for each token: fewer bytes help.",
            "The prompt's length": "The first word came at once, so reading the prompt is not what is slow.",
            "The tokenizer": "It takes microseconds a word; look at its phase in the bars.",
        },
        "The bytes read for each token",
    ),
    (
        "A tool summarises long documents in one sentence, and is slow. What helps?",
        {
            "Fewer bits a weight, for fewer bytes": "That helps decode. Here nearly all of the wait is prefill.",
            "Faster products, a shared or shorter prompt": "Prefill is arithmetic over all of the prompt's tokens.",
        },
        "Faster products, a shared or shorter prompt",
    ),
    (
        "A colleague says: 'this switch makes the model twice as fast'. Your first question?",
        {
            "Which of the two stages, and measured how?": "A switch moves TTFT, ITL or both, and one run is no figure.",
            "On which operating system?": "Perhaps later. First: which of TTFT and ITL, and how large is the noise?",
        },
        "Which of the two stages, and measured how?",
    ),
)
