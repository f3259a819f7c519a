"""The race: two ways to answer one prompt, run in turn, then replayed on one clock, each token at its measured time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

import labkit
from labkit.perf.busy import BusyWatch
from labkit.perf.trace import Trace
from labkit.prompts import ready_prompts
from labkit.run import Completion
from labkit.ui.compare import Comparison
from labkit.ui.controls import choice, slider
from labkit.ui.experiment import Experiment, Result
from labkit.ui.model_loader import model_for
from labkit.ui.words import say, sentences

TURNS = 3
SHOWN_PROMPT = 120


@dataclass(frozen=True)
class Lane:
    """One contender: what ``Pipeline`` is given, by the name on its lane."""

    name: str
    switches: Mapping[str, Any]
    weights: str | None = None
    """How both lanes' model holds its weights: the first lane's word counts."""


def presets() -> dict[str, tuple[Lane, Lane]]:
    """What can be raced here. Speculation is among them where a drafter is registered."""
    found = {
        "with and without a KV cache": (
            Lane("KV cache", {"kv_cache": "contiguous"}),
            Lane("no cache", {"kv_cache": "none"}),
        ),
        "the fast engine and plain PyTorch": (  # unpacked: plain PyTorch would unpack a file's blocks for each token
            Lane("fast engine", {"backend": "auto"}, "plain"),
            Lane("plain PyTorch", {"backend": "reference"}, "plain"),
        ),
    }
    drafters = [info.name for info in labkit.components("drafter") if info.unavailable is None]
    if drafters:
        drafted = Lane("with a drafter", {"drafter": drafters[0]})
        found["with and without speculation"] = (drafted, Lane("one token at a time", {}))
    return found


def pieces_of(tokenizer: Any, completion: Completion) -> list[tuple[float, str]]:
    """(seconds since the run began, text) of each token, as it was streamed."""
    stream = tokenizer.stream()
    return [(at, stream.push(i)) for at, i in zip(completion.trace.token_s, completion.token_ids, strict=True)]


def shown_at(pieces: Sequence[tuple[float, str]], now_s: float) -> str:
    """The text that had come ``now_s`` seconds after the start.

    >>> shown_at([(0.1, "Hel"), (0.3, "lo")], 0.2)
    'Hel'
    """
    return "".join(text for at, text in pieces if at <= now_s)


def lanes_html(
    names: Sequence[str], texts: Sequence[str], times: Sequence[Sequence[float]], now_s: float, prompt: str
) -> str:
    """Both lanes at one moment of the replay: the end of the prompt, paler, and what had come of the answer."""
    asked = prompt if len(prompt) <= SHOWN_PROMPT else f"… {prompt[-SHOWN_PROMPT:]}"
    lanes = []
    for name, text, token_s in zip(names, texts, times, strict=True):
        n = sum(at <= now_s for at in token_s)
        ended = now_s >= token_s[-1]
        state = say("{n} of {all} tokens", n=n, all=len(token_s))
        if ended:
            state = say("done after {took:.2f} s", took=token_s[-1])
        share = 100 * min(1.0, now_s / token_s[-1]) if token_s[-1] else 100.0
        lanes.append(
            '<div class="lk-lane">'
            f'<div class="lk-stage-name">{escape(say(name))} · <span class="lk-num">{state}</span></div>'
            f'<div class="lk-progress" aria-hidden="true"><i style="width:{share:.0f}%"></i></div>'
            f'<div class="lk-lane-text"><span class="lk-muted">{escape(asked)}</span>{escape(text)}</div></div>'
        )
    words = say("replay · {now:.1f} s on the runs' own clock", now=now_s)
    clock = f'<div class="lk-muted" role="timer">{words}</div>'
    return f'{clock}<div class="lk-lanes">{"".join(lanes)}</div>'


def measure_race(job: Any, *, race: str, prompt: str, n_tokens: int, speed: float) -> Result:
    """Both lanes in turn, three times; then the middle run of each is replayed, ``speed`` times as fast as it was."""
    lanes = presets()[race]
    model = model_for(job, weights=lanes[0].weights)
    runs: dict[str, list[Completion]] = {lane.name: [] for lane in lanes}
    with BusyWatch() as watch:
        for turn in range(TURNS):
            for idx, lane in enumerate(lanes):
                at = {"name": say(lane.name), "turn": turn + 1, "turns": TURNS}
                job.progress((2 * turn + idx) / (2 * TURNS), say("running {name}, turn {turn} of {turns}", **at))
                handle = labkit.Pipeline(model, **lane.switches).run(prompt, max_new_tokens=n_tokens, ignore_eos=True)
                while handle.running:
                    if job.stop_event.wait(0.05):
                        handle.stop()
                job.check()
                runs[lane.name].append(handle.result())
    middle = {name: sorted(done, key=lambda c: c.trace.wall_s)[TURNS // 2] for name, done in runs.items()}
    drawn_from = {
        "prompt": prompt,
        "busy_share": watch.share,
        "wall_s": {name: [c.trace.wall_s for c in done] for name, done in runs.items()},
        "pieces": {name: pieces_of(model.tokenizer, done) for name, done in middle.items()},
        "token_ids": {name: done.token_ids for name, done in middle.items()},
    }
    replay(job, drawn_from["pieces"], prompt, speed)
    return race_result(drawn_from)


def replay(job: Any, pieces: Mapping[str, Sequence[tuple[float, str]]], prompt: str, speed: float) -> None:
    """Both lanes on one clock, ``speed`` times as fast as they were; Stop ends it."""
    times = [[at for at, _ in lane] for lane in pieces.values()]
    end_s = max(lane[-1] for lane in times)
    started, now_s = time.perf_counter(), 0.0
    while now_s < end_s and not job.stopped:
        now_s = min(end_s, (time.perf_counter() - started) * speed)
        job.progress(now_s / end_s, say("replaying both on one clock"))
        texts = [shown_at(lane, now_s) for lane in pieces.values()]
        job.show(Result(extra=lanes_html(list(pieces), texts, times, now_s, prompt)))
        job.stop_event.wait(0.1)


def race_result(raw: dict[str, Any]) -> Result:
    """Both lanes at their end, and the table: of a race just run, or of one that was recorded."""
    pieces, wall_s, ids = raw["pieces"], raw["wall_s"], list(raw["token_ids"].values())
    compared = Comparison(wall_s, "s", raw["busy_share"])
    times = [[at for at, _ in lane] for lane in pieces.values()]
    end_s = max(lane[-1] for lane in times)
    texts = [shown_at(lane, end_s) for lane in pieces.values()]
    same = ids[0] == ids[1]
    texts_are = say("The texts are the same.") if same else say("The texts are not the same.")
    summary = sentences(say("The whole answer:"), compared.words(), texts_are)
    rows = []
    for name, token_s in zip(pieces, times, strict=True):
        trace = Trace((), tuple(token_s), median(wall_s[name]))
        rows.append(
            {
                "lane": say(name),
                "first token, ms": (trace.ttft_s or 0.0) * 1e3,
                "time per token, ms": trace.summary()["itl_median_ms"],
                "whole answer, s": trace.wall_s,
                "lowest": min(wall_s[name]),
                "highest": max(wall_s[name]),
            }
        )
    data = {"comparison": compared, "same": same, "token_ids": raw["token_ids"]}
    caption = "The middle one of three runs each, which took turns"
    extra = lanes_html(list(pieces), texts, times, end_s, raw["prompt"])
    return Result(None, rows, summary, caption, extra=extra, data=data, raw=raw)


def panel() -> Experiment:
    """Choose the contenders, run them, watch the replay."""
    texts = [(prompt.title, prompt.text) for prompt in ready_prompts() if not prompt.chat]
    fields = {
        "race": choice("Who races", list(presets()), width="270px"),
        "prompt": choice("Prompt", texts, width="220px"),
        "n_tokens": slider("New tokens", 8, 128, 48, step=8, width="190px"),
        "speed": choice("Replay", [("as fast as it was", 1.0), ("half as fast", 0.5), ("a quarter", 0.25)], 1.0),
    }
    note = "Both run alone, in turn, three times each. What you watch then is a replay of the middle run of each."
    question, recorded = "Which answer is there first?", ("race", race_result)
    return Experiment(question, measure_race, fields, note=note, recorded=recorded)
