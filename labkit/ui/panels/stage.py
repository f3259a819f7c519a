"""The demo for a stage: three controls, type that the last row can read, and slow motion on request."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import labkit
from labkit.perf.trace import Trace
from labkit.prompts import ready_prompts
from labkit.run import Completion
from labkit.ui.controls import choice, text
from labkit.ui.experiment import Experiment, Result
from labkit.ui.model_loader import model_for
from labkit.ui.panels.race import pieces_of, shown_at
from labkit.ui.phase_bars import PhaseBars, duration, phase_rows
from labkit.ui.recorded import completion_of
from labkit.ui.run_tiles import tiles
from labkit.ui.words import counted, say, sentences

MAX_NEW_TOKENS = 64
LIVE = 1.0
PACES = (("as it runs", LIVE), ("half as fast", 0.5), ("a quarter as fast", 0.25), ("a tenth as fast", 0.1))
LOOK_S = 0.1


@dataclass(frozen=True)
class Scene:
    """What stands on the stage at one moment."""

    trace: Trace
    prompt: str
    text: str
    running: bool


def until(trace: Trace, now_s: float) -> Trace:
    """The trace as it stood ``now_s`` seconds after the run began; a step under way counts with the part that is over.

    >>> until(Trace((), (0.1, 0.4), 0.5, 3), 0.2).token_s
    (0.1,)
    """
    steps = []
    for step in trace.steps:
        if step.start_s >= now_s:
            break
        length_s = step.end_s - step.start_s
        over = 1.0 if step.end_s <= now_s or not length_s else (now_s - step.start_s) / length_s
        phases = {name: seconds * over for name, seconds in step.phases.items()}
        steps.append(replace(step, end_s=min(step.end_s, now_s), phases=phases, detail=[]))
    token_s = tuple(at for at in trace.token_s if at <= now_s)
    return Trace(tuple(steps), token_s, min(trace.wall_s, now_s), trace.n_prompt_tokens, trace.meta)


def perform(job: Any, *, question: str, kept: str, pace: float) -> Result:
    """One run, shown as it goes; or, slower than it was, replayed at the times that were measured."""
    if not question.strip():
        raise ValueError("there is no question: type one.")
    model = model_for(job)
    pipeline = labkit.Pipeline(model, kv_cache=kept)
    run = pipeline.run(question, max_new_tokens=MAX_NEW_TOKENS, chat=True)
    asked = question + "\n"
    while run.running:
        if pace == LIVE:
            job.show(Result(data=Scene(run.snapshot(), asked, run.text, True)))
        if job.stop_event.wait(LOOK_S):
            run.stop()
        if not job.stopped:
            job.progress(-1, say("the model answers") if pace == LIVE else say("it runs first, unseen"))
    completion = run.result()
    if pace != LIVE and not job.stopped:
        replay(job, model.tokenizer, completion, asked, pace)
    return ended(completion, asked, pace)


def replay(job: Any, tokenizer: Any, completion: Completion, asked: str, pace: float) -> None:
    """The run once more, ``pace`` times as fast as it was."""
    pieces, trace = pieces_of(tokenizer, completion), completion.trace
    started, now_s = time.perf_counter(), 0.0
    while now_s < trace.wall_s and not job.stopped:
        now_s = min(trace.wall_s, (time.perf_counter() - started) * pace)
        job.show(Result(data=Scene(until(trace, now_s), asked, shown_at(pieces, now_s), True)))
        job.progress(now_s / trace.wall_s, say("slow motion: {now} of {all}", now=_s(now_s), all=_s(trace.wall_s)))
        job.stop_event.wait(LOOK_S)


def ended(completion: Completion, asked: str, pace: float = LIVE) -> Result:
    """The stage after a run: of a recorded one, too."""
    trace = completion.trace
    took = counted(
        trace.n_tokens,
        "**{n} token** in {took}; it came after {ttft}.",
        "**{n} tokens** in {took}; the first came after {ttft}.",
        took=duration(trace.wall_s),
        ttft=duration(trace.ttft_s or 0.0),
    )
    slow = say("What you saw was a replay, slowed down; the times are those of the run.") if pace != LIVE else ""
    caption = "Exclusive milliseconds by phase; together they are the run"
    scene = Scene(trace, asked, completion.text, False)
    return Result(None, phase_rows(trace), sentences(took, slow), caption, data=scene)


def draw_recorded(raw: dict[str, Any]) -> Result:
    return ended(completion_of(raw["run"]), raw["prompt"])


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s"


class Stage(Experiment):
    """An experiment whose picture is the phase bars, large."""

    def __init__(self) -> None:
        self.bars = PhaseBars()
        self.bars.show(None, text="", prompt="", running=False, tiles=tiles(None))
        first = next(prompt.text for prompt in ready_prompts() if prompt.name == "first")
        keeping = [("with a KV cache", "contiguous"), ("without", "none")]
        fields = {
            "question": text("Question", first, rows=1, width="min(100%, 520px)"),
            "kept": choice("It answers", keeping, "contiguous", width="210px"),
            "pace": choice("Shown", PACES, LIVE, width="210px"),
        }
        recorded = ("switchboard-first", draw_recorded)
        super().__init__("Where does the time go?", perform, fields, recorded=recorded)
        at = self.widget.children.index(self.figure)
        self.widget.children = (*self.widget.children[:at], self.bars, *self.widget.children[at + 1 :])
        self.widget.add_class("lk-on-stage")

    def _draw(self, result: Result) -> None:
        super()._draw(result)
        scene = result.data
        look = {"text": scene.text, "prompt": scene.prompt, "running": scene.running, "tiles": tiles(scene.trace)}
        self.bars.show(scene.trace, **look)

    def _clear(self) -> None:
        super()._clear()
        self.bars.show(None, text="", prompt="", running=False, tiles=tiles(None))


def panel() -> Stage:
    """The stage."""
    return Stage()
