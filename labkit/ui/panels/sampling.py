"""Lesson 05, generation and sampling: the time of each token without a cache, and how the next one is chosen."""

from __future__ import annotations

from statistics import median
from typing import Any

import plotly.graph_objects as go
import torch

from labkit.decoding.sampling import Sampling, keep_top_p, shape_logits
from labkit.model.config import dtype_name
from labkit.perf.cost import decode_cost
from labkit.prompts import ready_prompts
from labkit.ui import spread, theme
from labkit.ui.controls import choice, slider, text
from labkit.ui.exercise import Exercise
from labkit.ui.experiment import Experiment, Result

N_TURNS = 3
N_ENDS = 6
"""Tokens at each end of a run whose median is compared."""


# --- time per token, without a cache


def measure_climb(lab: Any, job: Any, *, prompt: str, n_tokens: int) -> Result:
    """Generate without a cache, the same text three times; each token's time as it comes, then median and range."""
    machine = spread.this_machine(job, lab.model)
    pipeline = lab.pipeline(kv_cache="none", backend="reference")
    done: list[Any] = []
    for turn in range(N_TURNS):
        run = pipeline.run(prompt, max_new_tokens=n_tokens, ignore_eos=True)
        try:
            while run.running:
                live = run.snapshot()
                share = (turn + min(1.0, live.n_tokens / n_tokens)) / N_TURNS
                job.progress(share, f"run {turn + 1} of {N_TURNS}, token {live.n_tokens} of {n_tokens}")
                if len(live.itl_s) >= 2 and not done:
                    job.show(_climb_result(lab.model, machine, [live]))
                job.stop_event.wait(0.1)
        finally:
            run.stop()
        done.append(run.result(timeout=60))
        job.show(_climb_result(lab.model, machine, [c.trace for c in done]))
    result = _climb_result(lab.model, machine, [c.trace for c in done])
    result.data["token_ids"], result.data["text"] = done[0].token_ids, done[0].text
    return result


def _climb_result(model: Any, machine: Any, traces: list[Any]) -> Result:
    trace = traces[0]
    turns = [[s * 1e3 for s in each] for each in zip(*(t.itl_s for t in traces), strict=False)]
    times_ms = [median(each) for each in turns]
    lengths = [trace.n_prompt_tokens + i for i in range(1, len(times_ms) + 1)]
    n = min(N_ENDS, len(times_ms) // 2) or 1
    early, late = median(times_ms[:n]), median(times_ms[-n:])
    dtype = dtype_name(model.dtype)
    costs = [decode_cost(model.config, length - 1, kv_cache="none", dtype=dtype).total for length in lengths]
    work = [cost.flops for cost in costs]
    least = [spread.least_s(machine, model, cost) * 1e3 for cost in costs]
    bars = {"error_y": spread.error_bars(turns)} if len(traces) > 1 else {}
    name = "measured: median and range" if bars else "measured: each token"
    figure = go.Figure(
        [
            go.Scatter(x=lengths, y=times_ms, name=name, mode="markers", **bars, **theme.series(0)),
            go.Scatter(
                x=lengths,
                y=[late * w / median(work[-n:]) for w in work],
                name="counted: in proportion to the arithmetic",
                mode="lines",
                **theme.series(1),
            ),
            go.Scatter(x=lengths, y=least, name="ceiling: no faster on this machine", mode="lines", **theme.series(2)),
        ]
    )
    theme.figure_layout(figure, x="tokens in the sequence", y="ms for the next token")
    figure.update_yaxes(rangemode="tozero")

    def mark(figure: Any, guess: float) -> None:
        figure.add_hline(y=early * guess, line={"color": theme.VERMILION, "dash": "dash"}, annotation_text="your guess")

    rows = [
        {"tokens": length, "ms": ms, "lowest": min(all_), "highest": max(all_), "at least, ms": ms0, "GFLOP": w / 1e9}
        for length, ms, all_, ms0, w in list(zip(lengths, times_ms, turns, least, work, strict=True))[
            :: max(1, len(lengths) // 10)
        ]
    ]
    summary = (
        f"The first tokens took {early:.0f} ms each, the last ones {late:.0f} ms: **{late / early:.1f} times** as "
        f"long, with {work[-1] / work[0]:.1f} times the arithmetic."
    )
    data = {"times_ms": times_ms, "work": work, "ratio": late / early, "n_tokens": trace.n_tokens}
    return Result(
        figure, rows, summary, f"Some of the tokens; {len(traces)} runs of the same text", mark_guess=mark, data=data
    )


def climb_panel(lab: Any, guess: Any = None) -> Experiment:
    """Watch the time per token climb."""

    def run(job: Any, **values: Any) -> Result:
        return measure_climb(lab, job, **values)

    prompts = [(p.title, p.text) for p in ready_prompts() if not p.chat]
    fields = {
        "prompt": choice(
            "Prompt", prompts, next(p.text for p in ready_prompts() if p.name == "one_word"), width="260px"
        ),
        "n_tokens": slider("New tokens", 8, 160, 64, step=8),
    }
    return Experiment(
        "Without a cache, does every token take equally long?", run, fields, guess=guess, confounders=("prompt",)
    )


# --- the next token


@torch.inference_mode()
def next_logits(model: Any, prompt: str) -> torch.Tensor:
    """Logits (V,) float32 of the token after ``prompt``."""
    return model(model.tokenizer.encode_prompt(prompt))[-1].cpu()


def measure_choice(lab: Any, job: Any, *, prompt: str, temperature: float, top_p: float, n_draws: int) -> Result:
    """The distribution of the next token before and after shaping, and how often each was really drawn."""
    job.progress(-1, "one forward pass")
    logits = next_logits(lab.model, prompt)
    sampling = Sampling(temperature=temperature, top_p=top_p)
    before = logits.softmax(0)
    after = shape_logits(logits, sampling).softmax(0) if temperature else _certain(logits)
    job.progress(-1, "drawing")
    generator = torch.Generator().manual_seed(0)
    draws = torch.multinomial(after, n_draws, replacement=True, generator=generator)
    counts = draws.bincount(minlength=len(logits)).float()
    best = before.topk(12).indices.tolist()
    names = [repr(lab.tokenizer.decode([i])) for i in best]
    drawn = counts / n_draws
    figure = go.Figure(
        [
            go.Bar(x=names, y=before[best], name="the model's own", marker={"color": theme.GREY}),
            go.Bar(x=names, y=after[best], name="after temperature and top-p", marker={"color": theme.BLUE}),
            go.Bar(
                x=names,
                y=drawn[best],
                name=f"drawn, {n_draws} times",
                marker={"color": theme.ORANGE, "pattern": {"shape": "/"}},
            ),
        ]
    )
    theme.figure_layout(figure, x="next token", y="probability")
    figure.update_layout(barmode="group")
    kept = int((after > 0).sum())
    rows = [
        {"token": name, "model": float(before[i]), "shaped": float(after[i]), "drawn": float(drawn[i])}
        for name, i in zip(names, best, strict=True)
    ]
    summary = f"**{kept:,}** of {len(logits):,} tokens can still be drawn; the best one has {float(after.max()):.0%}."
    data = {"kept": kept, "after": after, "counts": counts}
    return Result(figure, rows, summary, "The twelve most likely tokens", data=data)


def _certain(logits: torch.Tensor) -> torch.Tensor:
    """Temperature 0: all probability on the best token."""
    return torch.nn.functional.one_hot(logits.argmax(), len(logits)).float()


def choice_panel(lab: Any) -> Experiment:
    """Shape the distribution, then draw from it."""

    def run(job: Any, **values: Any) -> Result:
        return measure_choice(lab, job, **values)

    fields = {
        "prompt": text("Your prompt", "My favourite thing about winter is the", rows=2),
        "temperature": slider("Temperature", 0.0, 2.0, 1.0, step=0.1, width="190px"),
        "top_p": slider("Top-p", 0.05, 1.0, 0.9, step=0.05, width="190px"),
        "n_draws": slider("Draws", 100, 1000, 300, step=100, width="190px"),
    }
    return Experiment("Which tokens can come next, and how often do they?", run, fields)


def survivors(model: Any, prompt: str, temperatures: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0)) -> list[dict[str, Any]]:
    """How many tokens each cut leaves as the temperature rises: counted from one real distribution."""
    logits = next_logits(model, prompt)
    cuts = {"top-p 0.9": {"top_p": 0.9}, "top-k 40": {"top_k": 40}, "min-p 0.05": {"min_p": 0.05}}
    return [
        {"temperature": t}
        | {
            name: int(shape_logits(logits, Sampling(temperature=t, **cut)).isfinite().sum())
            for name, cut in cuts.items()
        }
        for t in temperatures
    ]


# --- the exercise


def _kept(probabilities: list[float], p: float) -> list[int]:
    """labkit's own nucleus: which indices stay."""
    kept = keep_top_p(torch.tensor(probabilities).log(), p)
    return torch.nonzero(kept.isfinite()).flatten().tolist()


NUCLEUS = Exercise(
    "the nucleus of top-p",
    cases=[
        ([0.5, 0.3, 0.15, 0.05], 0.7),
        ([0.1, 0.6, 0.05, 0.25], 0.9),
        ([0.25, 0.75], 0.1),
        ([0.4, 0.35, 0.25], 1.0),
    ],
    oracle=_kept,
    same=lambda found, expected: sorted(found) == expected,
    hints=(
        "Go through the tokens from the most likely to the least, and keep adding up what you have taken.",
        "Take the token first, then look: stop as soon as the sum reaches p. So at least one token is taken.",
        "`for i in sorted(range(len(probabilities)), key=lambda i: -probabilities[i]):` takes them in order.",
    ),
)

QUIZ = (
    (
        "Without a cache, an answer twice as long takes, in total, about...",
        {
            "twice as long": "That would hold if every token cost the same. Here each one costs more than the last.",
            "four times as long": "Yes, once the work and not the weights' reading sets the pace: the sum is a square.",
        },
        "four times as long",
    ),
    (
        "Top-k with k = 1 and temperature 2: what is the text like?",
        {
            "Wild": "No: with a single candidate left there is nothing to draw from, however hot.",
            "The greedy text": "Right: the best token stays the best at any temperature, and only it is left.",
        },
        "The greedy text",
    ),
    (
        "What does sampling cost, next to the model's own work?",
        {
            "Nearly nothing": "Yes: one pass over the vocabulary's scores against every weight of the model.",
            "About as much": "No. Look for *sample* in a run's phase bars: you need good eyes.",
        },
        "Nearly nothing",
    ),
)
