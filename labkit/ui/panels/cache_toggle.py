"""Lesson 06: one run whose KV cache is switched while it goes, and what every token took before and after."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.model.config import dtype_name
from labkit.perf.cost import decode_cost
from labkit.perf.formats import cache_nbytes
from labkit.prompts import ready_prompts
from labkit.ui import controls, spread, theme
from labkit.ui.controls import choice, slider
from labkit.ui.errors import guarded
from labkit.ui.experiment import Experiment, Result
from labkit.ui.findings import takes
from labkit.ui.recorded import trace_data, trace_of
from labkit.ui.words import counted, say

ON, OFF = "contiguous", "none"
CEILING_HERE = "ceiling: no faster here"
N_TURNS = 3


def measure_toggle(lab: Any, job: Any, panel: Any, *, prompt: str, n_tokens: int, switch_at: int) -> Result:
    """One run that starts without a cache and gets one at a given token; the reader may switch it too, at any time.
    Then the same run twice more, with the switches where they came: for the range."""
    machine = spread.this_machine(job, lab.model)
    done: list[Any] = []
    for turn in range(N_TURNS):
        run = lab.pipeline(kv_cache=OFF, backend="reference").run(prompt, max_new_tokens=n_tokens, ignore_eos=True)
        plan = _switches(done[0].trace) if done else [(switch_at, ON)]
        panel.run_handle, drawn = (None if done else run), 2
        try:
            while run.running:
                live = run.snapshot()
                while plan and live.n_tokens >= plan[0][0] and live.meta.get("kv_caches"):
                    kind = plan.pop(0)[1]
                    if live.meta["kv_cache"] != kind:
                        run.use_cache(kind)
                share = (turn + min(1.0, live.n_tokens / n_tokens)) / N_TURNS
                at = {"run": turn + 1, "runs": N_TURNS, "token": live.n_tokens, "tokens": n_tokens}
                job.progress(share, say("run {run} of {runs}, token {token} of {tokens}", **at))
                if live.n_tokens > drawn and not done:
                    drawn = live.n_tokens
                    job.show(_toggle_result(**_drawn_from(lab.model, machine, [live])))
                job.stop_event.wait(0.02)  # a switch comes at the next look
        finally:
            run.stop()
            panel.run_handle = None
        done.append(run.result(timeout=60))
    drawn_from = _drawn_from(lab.model, machine, [c.trace for c in done])
    result = _toggle_result(**drawn_from)
    result.raw = drawn_from | {"traces": [trace_data(c.trace) for c in done]}
    result.data |= {"token_ids": done[0].token_ids, "text": done[0].text}
    return result


def _switches(trace: Any) -> list[tuple[int, str]]:
    """(after how many tokens, which cache) of each switch in a run."""
    return [(used["from_token"], used["name"]) for used in trace.meta["kv_caches"][1:]]


def step_kinds(trace: Any) -> list[str]:
    """For each token after the first: the cache that made it, or "filling" for a step that fills a new cache."""
    used = cache_in_use(trace)
    return ["filling" if b == ON and a != b else b for a, b in pairwise(used)]


def repeats_of(traces: list[Any]) -> list[list[float]]:
    """The first run's milliseconds for each token after its first, and the other runs' that did the same step there.

    A switch may come a token earlier or later from run to run, and a step is compared with its like only."""
    kinds = [step_kinds(trace) for trace in traces]
    return [
        [trace.itl_s[i] * 1e3 for trace, own in zip(traces, kinds, strict=True) if i < len(own) and own[i] == kind]
        for i, kind in enumerate(kinds[0][: len(traces[0].itl_s)])
    ]


def least_ms(machine: Any, model: Any, trace: Any) -> list[float]:
    """What each token after the first takes at least on this machine, by its counted step."""
    dtype, found = dtype_name(model.dtype), []
    for i, kind in enumerate(step_kinds(trace)):
        past = trace.n_prompt_tokens + i
        cost = decode_cost(model.config, past, kv_cache=ON if kind == ON else OFF, dtype=dtype).total
        found.append(spread.least_s(machine, model, cost) * 1e3)
    return found


def cache_in_use(trace: Any) -> list[str]:
    """Which cache made each token."""
    used = trace.meta["kv_caches"]
    return [next(u["name"] for u in reversed(used) if u["from_token"] <= i) for i in range(trace.n_tokens)]


def bytes_held(trace: Any, a_token: int) -> list[int]:
    """Bytes of keys and values that were kept after each token: the last token's own come with the next step."""
    return [0 if name == OFF else a_token * (trace.n_prompt_tokens + i) for i, name in enumerate(cache_in_use(trace))]


def _drawn_from(model: Any, machine: Any, traces: list[Any]) -> dict[str, Any]:
    """What the figure needs to know: the runs, the least time of each token, the bytes that one keeps."""
    a_token = cache_nbytes(model.config, n_tokens=1, dtype=model.dtype)
    return {"traces": traces, "least": least_ms(machine, model, traces[0]), "a_token": a_token}


def draw_recorded(raw: dict[str, Any]) -> Result:
    """The figure of a run that was recorded, whose ceiling is that machine's."""
    result = _toggle_result([trace_of(each) for each in raw["traces"]], raw["least"], raw["a_token"])
    for line in result.figure.select_traces({"name": say(CEILING_HERE)}):
        line.name = say("ceiling: no faster there")
    return result


def _toggle_result(traces: list[Any], least: list[float], a_token: int) -> Result:
    trace, turns = traces[0], repeats_of(traces)
    times_ms, least = [median(each) for each in turns], least[: len(turns)]
    used, held = cache_in_use(trace)[1:], bytes_held(trace, a_token)[1:]
    numbers = list(range(2, 2 + len(times_ms)))
    figure = make_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.08)
    for idx, (name, label) in enumerate(((OFF, "without a cache"), (ON, "with the cache"))):
        mine = [i for i, kind in enumerate(used) if kind == name]
        if mine:
            dots = go.Scatter(
                x=[numbers[i] for i in mine],
                y=[times_ms[i] for i in mine],
                error_y=spread.error_bars([turns[i] for i in mine]) if len(traces) > 1 else None,
                name=say(label),
                mode="markers",
                **theme.series(idx),
            )
            figure.add_trace(dots, 1, 1)
    floor = {"mode": "lines", "line": {"color": theme.NEUTRAL, "dash": "dot", "shape": "hvh"}}
    figure.add_trace(go.Scatter(x=numbers, y=least, name=say(CEILING_HERE), **floor), 1, 1)
    memory = go.Scatter(x=numbers, y=[b / 1e6 for b in held], name=say("keys and values kept"), **theme.series(2))
    figure.add_trace(memory, 2, 1)
    theme.figure_layout(figure, x="new token", y="")
    look = {name: figure.layout.xaxis[name] for name in ("gridcolor", "linecolor", "zerolinecolor", "ticks")}  # type: ignore[attr-defined]
    figure.update_xaxes(**look, automargin=True, title_standoff=12)
    figure.update_yaxes(**look, automargin=True, title_standoff=12)
    figure.update_xaxes(title_text="", row=1, col=1)
    figure.update_yaxes(title_text=say("ms a token"), rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text=say("MB kept"), rangemode="tozero", row=2, col=1)
    figure.update_layout(height=430)
    for switch in trace.meta["kv_caches"][1:]:
        words, at = say("cache on") if switch["name"] == ON else say("cache off"), switch["from_token"] + 1
        line = {"color": theme.VERMILION, "dash": "dot"}
        figure.add_shape(type="line", x0=at, x1=at, y0=0, y1=1, xref="x", yref="paper", line=line)
        figure.add_annotation(x=at, y=1, yref="paper", text=words, showarrow=False, xanchor="left", yanchor="top")
    medians = {name: median(ms) for name in (OFF, ON) if (ms := _settled(times_ms, used, name))}
    rows = [
        {
            "new token": n,
            "cache": kind,
            "ms": median(all_),
            "lowest": min(all_),
            "highest": max(all_),
            "bytes kept": kept,
        }
        for n, kind, all_, kept in list(zip(numbers, used, turns, held, strict=True))[:: max(1, len(numbers) // 12)]
    ]
    summary = ""
    if len(medians) == 2:
        summary = say(
            "A token took {off:.0f} ms without the cache and {on:.0f} ms with it: with it a token takes **{ratio}**; "
            "memory grew by {a_token:,} bytes with each.",
            off=medians[OFF],
            on=medians[ON],
            ratio=takes(medians[OFF] / medians[ON]),
            a_token=a_token,
        )
    data = {"used": cache_in_use(trace), "times_ms": times_ms, "held": held, "bytes_a_token": a_token}
    data |= {"switches": trace.meta["kv_caches"], "medians_ms": medians, "n_prompt": trace.n_prompt_tokens}
    some = "Some of the tokens; one run", "Some of the tokens; {n} runs with the same switches"
    return Result(figure, rows, summary, counted(len(traces), *some), data=data)


def _settled(times_ms: list[float], used: list[str], name: str) -> list[float]:
    """Times under one cache; the token that fills a new cache goes through everything once more and is left out."""
    return [ms for i, ms in enumerate(times_ms) if used[i] == name and (i == 0 or used[i - 1] == name)]


class TogglePanel(Experiment):
    """The experiment, and one more button that works while it runs."""

    def __init__(self, lab: Any, guess: Any = None) -> None:
        def run(job: Any, **values: Any) -> Result:
            return measure_toggle(lab, job, self, **values)

        prompts = [(p.title, p.text) for p in ready_prompts() if not p.chat]
        story = next(p.text for p in ready_prompts() if p.name == "story")
        fields = {
            "prompt": choice("Prompt", prompts, story, width="240px"),
            "n_tokens": slider("New tokens", 16, 160, 32, step=8),
            "switch_at": slider("Cache on after token", 4, 80, 12, step=4),
        }
        super().__init__(
            "What changes when the cache comes on in the middle of a run?",
            run,
            fields,
            guess=guess,
            recorded=("cache-toggle", draw_recorded),
            note="The run starts without a cache. The button switches it while it runs, as often as you like.",
        )
        self.run_handle: Any = None
        self.switch_button = controls.button("Switch the cache now", guarded(self.error, self.switch))
        self.widget.children = (
            *self.widget.children[:-4],
            controls.row(self.switch_button),
            *self.widget.children[-4:],
        )

    def switch(self) -> None:
        """Give the run under way the other cache, from its next token on."""
        run = self.run_handle
        if run is None or not run.running:
            self.status.set("idle", say("Press Run first: there is nothing to switch yet."))
            return
        run.use_cache(OFF if run.snapshot().meta.get("kv_cache") == ON else ON)
