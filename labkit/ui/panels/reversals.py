"""Where it loses, measured: for lessons 03, 06, 07 and 08 the one setting that should turn the lesson's result round.

Every contender takes its turn three times. Whether the result turned, the sentence says from the numbers: on another
machine it may not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import plotly.graph_objects as go
import torch

from labkit.kvcache import Sliding
from labkit.model.config import dtype_name
from labkit.perf.cost import decode_cost, step_cost
from labkit.perf.probe import Bench, Point, engine_of
from labkit.prompts import ready_prompts
from labkit.ui import spread, theme
from labkit.ui.compare import ALIKE, Comparison
from labkit.ui.controls import choice, slider
from labkit.ui.experiment import Experiment, Result
from labkit.ui.panels.attention import crossing
from labkit.ui.panels.roofline import engine_here
from labkit.ui.turns import ROUGH, bars, rows_of, take_turns
from labkit.ui.words import counted, say, sentences

# --- 03: a window


def window(lab: Any, job: Any, *, n_kept: int, longest: int) -> Result:
    """Attention's part of attention + FFN in a step of 16 tokens, by how many came before: all of them in view, or a
    window of ``n_kept``. The keys are random; a step takes as long whatever they are."""
    model, names = lab.model, {say("the whole past"): "contiguous", say("the last {n}", n=n_kept): Sliding(n_kept, 4)}
    pasts = [n for n in (128, 512, 1024, 2048, 4096) if n <= longest]
    machine = spread.this_machine(job, model)
    contenders: dict[str, Callable[[], float]] = {}
    for name, kind in names.items():
        bench = Bench(model.config, engine_of(model, kv_cache=kind, backend="reference"), transformer=model.transformer)
        for n in pasts:
            contenders[_at(name, n)] = lambda bench=bench, n=n: _share(bench.sample(Point("lesson", 16, n)))
    turns, busy = take_turns(job, contenders)
    figure, data, rows = go.Figure(), {"busy": busy, "n_kept": n_kept, "lengths": pasts}, rows_of(turns, "%")
    for idx, name in enumerate(names):
        mine = [turns[_at(name, n)] for n in pasts]
        middle = [median(values) for values in mine]
        at = [float(n) for n in pasts]
        data["window" if idx else "whole"] = {"share": middle, "crossing": crossing(at, middle, 50.0)}
        figure.add_scatter(
            x=pasts,
            y=middle,
            error_y=spread.error_bars(mine),
            name=say("measured: {what}", what=name),
            **theme.series(idx),
        )
    least = []
    for n in pasts:
        step = step_cost(model.config, n_new=16, n_past=n, dtype=dtype_name(model.dtype))
        a, f = (spread.least_s(machine, model, step.phases[name]) for name in ("attention", "ffn"))
        least.append(100 * a / (a + f))
    figure.add_scatter(x=pasts, y=least, name=say("whole past, both at their ceilings"), **theme.series(2))
    theme.figure_layout(figure, x="tokens that came before (log)", y="attention's part of attention + FFN (%)")
    figure.update_xaxes(type="log", tickvals=pasts, ticktext=[f"{n:,}" for n in pasts])
    figure.add_hline(y=50, line={"color": theme.NEUTRAL, "dash": "dot"}, annotation_text=say("half"))
    return Result(figure, rows, said_of_window(data), "Attention's part, three turns each", data=data)


def _at(name: str, n: int) -> str:
    return say("{what}, {n:,} tokens", what=name, n=n)


def _share(phases: Mapping[str, float]) -> float:
    return 100 * phases["attention"] / (phases["attention"] + phases["ffn"])


def said_of_window(data: Mapping[str, Any]) -> str:
    """Whether a window took the crossing away."""
    whole, kept, longest = data["whole"]["crossing"], data["window"]["crossing"], data["lengths"][-1]
    ends = data["whole"]["share"][-1], data["window"]["share"][-1]
    took = (
        "After {n:,} tokens attention took {whole:.0f} % with the whole past and {kept:.0f} % with the last {window}."
    )
    last = say(took, n=longest, whole=ends[0], kept=ends[1], window=data["n_kept"])
    if whole is None:
        lighter = "Nothing to turn round: even with the whole past attention stayed the lighter half up to {n:,}."
        turned = say(lighter, n=longest)
    elif kept is None:
        never = "**Turned round**: attention overtakes the FFN by {n:,.0f} tokens, and with the window never."
        turned = say(never, n=whole)
    else:
        turned = say("**Not turned round here**: attention overtakes with the window too.")
    return sentences(turned, last, say(ROUGH) if data["busy"] else "")


def window_panel(lab: Any) -> Experiment:
    fields = {
        "n_kept": choice("The window keeps", [(say("{n:,} tokens", n=n), n) for n in (64, 128, 512)], 128),
        "longest": choice("Longest past", [(say("{n:,} tokens", n=n), n) for n in (1024, 2048, 4096)], 2048),
    }
    return _panel("Does a window keep attention below the FFN?", window, lab, fields)


# --- 06: an answer too short


def short_answer(lab: Any, job: Any, *, prompt: str, n_tokens: int) -> Result:
    """The whole answer's time with and without a cache: of one token there is nothing to remember for."""
    machine, made = spread.this_machine(job, lab.model), {}

    def whole(kind: str) -> float:
        options: dict[str, Any] = {"max_new_tokens": n_tokens, "ignore_eos": True}
        made[kind] = lab.pipeline(kv_cache=kind, backend="reference").generate(prompt, **options).trace
        return made[kind].wall_s * 1e3

    kinds = {say("no cache"): "none", say("KV cache"): "contiguous"}
    turns, busy = take_turns(job, {name: lambda kind=kind: whole(kind) for name, kind in kinds.items()})
    n_prompt, dtype = made["none"].n_prompt_tokens, dtype_name(lab.model.dtype)
    least = [sum(_least_ms(machine, lab.model, n_prompt, n_tokens, kind, dtype)) for kind in kinds.values()]
    found = Comparison(turns, "ms", 1.0 if busy else 0.0)
    kept = made["contiguous"].meta["kv_cache_bytes"]
    data = {"comparison": found, "n_tokens": n_tokens, "bytes": kept}
    figure = bars(turns, least, say("ms for an answer of {n}", n=n_tokens))
    return Result(figure, rows_of(turns, "ms"), said_of_short(data), "Three turns each", data=data)


def _least_ms(machine: Any, model: Any, n_prompt: int, n_new: int, kind: str, dtype: str) -> list[float]:
    first = step_cost(model.config, n_new=n_prompt, dtype=dtype)
    later = [decode_cost(model.config, n_prompt + i, kv_cache=kind, dtype=dtype) for i in range(n_new - 1)]
    return [spread.least_s(machine, model, step.total) * 1e3 for step in (first, *later)]


def said_of_short(data: Mapping[str, Any]) -> str:
    """Whether so short an answer took the cache's gain away."""
    found, n = data["comparison"], data["n_tokens"]
    answer, held = counted(n, "one token", "{n:,} tokens"), ""
    if found.clear and found.ratio < 1:
        turned = say("**Not turned round**: with an answer of {answer} the cache pays already.", answer=answer)
    else:
        turned = say("**Turned round**: for an answer of {answer} the cache gained nothing.", answer=answer)
        held = say("It holds {mb:.1f} MB.", mb=data["bytes"] / 1e6) if data["bytes"] else ""
    return sentences(turned, held, found.words())


def short_panel(lab: Any) -> Experiment:
    prompts = [(p.title, p.text) for p in ready_prompts() if not p.chat]
    story = next(p.text for p in ready_prompts() if p.name == "story")
    fields = {
        "n_tokens": choice("The answer's tokens", [1, 2, 4, 16, 64], 1),
        "prompt": choice("Prompt", prompts, story, width="240px"),
    }
    return _panel("How short an answer does the cache not help?", short_answer, lab, fields)


# --- 07: a long context


def long_context(lab: Any, job: Any, *, n_together: int, n_past: int) -> Result:
    """What ``n_together`` sequences in one step gain over one, at a context of 64 tokens and at one of ``n_past``."""
    model = lab.model
    machine, engine = spread.this_machine(job, model), engine_here(model)
    bench, contenders, least = Bench(model.config, engine, transformer=model.transformer), {}, []
    for past in (64, n_past):
        for n in (1, n_together):
            point = Point("lesson", 1, past, n)
            contenders[f"{n} x {past:,}"] = lambda point=point: bench.sample(point)["step"] * 1e3 / point.n_sequences
            step = decode_cost(model.config, past, n_sequences=n, dtype=engine.dtype, weights=engine.weights)
            least.append(spread.least_s(machine, model, step.total) * 1e3 / n)
    turns, busy = take_turns(job, contenders)
    gains = {past: _gain(turns[f"1 x {past:,}"], turns[f"{n_together} x {past:,}"]) for past in (64, n_past)}
    data = {"gains": gains, "n_together": n_together, "n_past": n_past, "busy": busy}
    title = say("sequences together x tokens of context")
    figure = bars(turns, least, "ms a token").update_xaxes(title_text=title)
    return Result(figure, rows_of(turns, "ms a token"), said_of_context(data), "Three turns each", data=data)


def _gain(alone: Sequence[float], together: Sequence[float]) -> tuple[float, float, float]:
    """(by the medians, smallest, largest of a turn): how many times the tokens a second."""
    ratios = [a / b for a, b in zip(alone, together, strict=True)]
    return median(alone) / median(together), min(ratios), max(ratios)


def said_of_context(data: Mapping[str, Any]) -> str:
    """Whether a long context took the batch's gain away."""
    (near, near_low, _), (far, _, far_high) = (data["gains"][past] for past in (64, data["n_past"]))
    gave = "{n} together gave {near:.1f} times the tokens a second at a context of 64, {far:.1f} times at {context:,}."
    both = say(gave, n=data["n_together"], near=near, far=far, context=data["n_past"])
    if far_high >= near_low:
        turned = say("**Not turned round here**: the turns do not tell the two gains apart.")
    elif far <= 1 + ALIKE:
        turned = say("**Turned round**: at the long context the batch gained nothing.")
    else:
        turned = say("**Partly**: the long context took some of the gain, not all.")
    return sentences(turned, both, say(ROUGH) if data["busy"] else "")


def context_panel(lab: Any) -> Experiment:
    fields = {
        "n_together": choice("Together", [2, 4], 4),
        "n_past": choice("Long context", [(say("{n:,} tokens", n=n), n) for n in (256, 1024, 2048)], 1024),
    }
    return _panel("Does a batch still pay at a long context?", long_context, lab, fields)


# --- 08: the time that smaller takes


def smaller(lab: Any, job: Any, *, n_past: int, backend: str) -> Result:
    """One decode step on a full, an int8 and an int4 cache of ``n_past`` tokens."""
    model = lab.model
    machine, contenders, least = spread.this_machine(job, model), {}, []
    for kind in ("contiguous", "int8", "int4"):
        engine = engine_here(model, kv_cache=kind, backend=backend)
        bench = Bench(model.config, engine, transformer=model.transformer)
        contenders[kind] = lambda bench=bench: bench.sample(Point("lesson", 1, n_past))["step"] * 1e3
        step = decode_cost(model.config, n_past, dtype=engine.dtype, weights=engine.weights, kv_cache=kind)
        least.append(spread.least_s(machine, model, step.total) * 1e3)
    for warm in contenders.values():
        with torch.inference_mode():
            warm()
    turns, busy = take_turns(job, contenders)
    data = {"turns": turns, "busy": busy, "n_past": n_past}
    figure = bars(turns, least, "ms for the next token")
    return Result(
        figure,
        rows_of(turns, "ms"),
        said_of_smaller(data),
        say("Computed by {backend}", backend=engine.backend),
        data=data,
    )


def said_of_smaller(data: Mapping[str, Any]) -> str:
    """Whether fewer bytes cost time, kind by kind."""
    full, said = data["turns"]["contiguous"], []
    for kind in ("int8", "int4"):
        found = Comparison({"contiguous": full, kind: data["turns"][kind]})
        if not found.clear:
            words = "**{kind}** is smaller, and no slower and no faster that these turns could tell."
        elif found.ratio > 1:
            words = "**{kind}** is smaller and **slower**: {ratio:.2f} times the time of the full cache."
        else:
            words = "**{kind}** is smaller and **faster**: {ratio:.2f} times the time of the full cache."
        said.append(say(words, kind=kind, ratio=found.ratio))
    return sentences(*said, say(ROUGH) if data["busy"] else "")


def smaller_panel(lab: Any) -> Experiment:
    fields = {
        "n_past": slider("Tokens in the cache", 64, 2048, 256, step=64, width="230px"),
        "backend": choice("Computed by", [("the fastest engine here", "auto"), ("plain PyTorch", "reference")], "auto"),
    }
    return _panel("Is a smaller cache also a faster one?", smaller, lab, fields)


def _panel(question: str, measure: Callable[..., Result], lab: Any, fields: dict[str, Any]) -> Experiment:
    return Experiment(question, lambda job, **values: measure(lab, job, **values), fields)
