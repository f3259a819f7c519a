"""The run of a lesson: at most four controls, Run / Stop / Reset, a status line, one figure and its table twin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from html import escape
from typing import Any

import ipywidgets as w

from labkit.ui import controls, html
from labkit.ui.errors import ErrorBox, guarded, under_test
from labkit.ui.narrow import fit
from labkit.ui.predict import WAITING
from labkit.ui.recorded import Recording, recording
from labkit.ui.runner import Job, Runner, in_foreground
from labkit.ui.status import StatusLine
from labkit.ui.words import say

MAX_CONTROLS = 4
KINDS = {
    "measured": "measured here",
    "simulated": "simulated",
    "recorded": "recorded",
    "predicted": "predicted",
}


@dataclass
class Result:
    """What a run shows. ``summary`` is one sentence that says the figure in words; ``rows`` are its table twin."""

    figure: Any = None
    rows: Any = ()
    summary: str = ""
    caption: str = ""
    extra: str = ""
    """Further HTML of ours, below the figure; texts in it are escaped by who makes it."""
    mark_guess: Callable[[Any, Any], None] | None = None
    """``mark_guess(figure, guess)`` draws the reader's guess into the figure; without it the guess stands above it."""
    data: Any = None
    """For the code: what asserts look at, and what later runs draw beside theirs."""
    raw: dict[str, Any] | None = None
    """What the panel draws this from, as JSON: ``benchmarks/recorded.py`` keeps it."""


@dataclass
class ExperimentJob:
    """What ``run(job, **values)`` works with."""

    _job: Job
    history: list[Any] = field(default_factory=list)
    """``Result.data`` of the earlier runs since the last reset, so that dots of several runs stand side by side."""
    _shown: Result | None = None

    @property
    def stopped(self) -> bool:
        return self._job.stopped

    @property
    def stop_event(self) -> Any:
        return self._job.stop_event

    @property
    def foreground(self) -> bool:
        return self._job.foreground

    def check(self) -> None:
        self._job.check()

    def progress(self, fraction: float, message: str = "") -> None:
        """How far, 0 to 1, and what it is doing. Leaves the work here when Stop was pressed."""
        self._job.progress(fraction, message)

    def show(self, result: Result) -> None:
        """An interim result; the page shows the latest one, at most five times a second."""
        self._shown = result
        self._job.tick()


class Experiment:
    """A panel around one question.

    ``run(job, **values)`` gets the controls' values by name, works in the background, and returns a ``Result``.
    ``kind`` labels what the figure shows: measured here, simulated, recorded or predicted. Changing a control
    in ``confounders`` clears the earlier results, which would not be comparable. ``recorded`` is the name of a
    recorded run and how to draw it (from its ``Result.raw``): it stands there, labelled, until the first run.
    """

    def __init__(
        self,
        question: str,
        run: Callable[..., Result],
        fields: Mapping[str, Any] | None = None,
        *,
        kind: str = "measured",
        note: str = "",
        guess: Any = None,
        confounders: Sequence[str] = (),
        recorded: tuple[str, Callable[[dict[str, Any]], Result]] | None = None,
    ) -> None:
        self.fields: dict[str, Any] = dict(fields or {})
        if len(self.fields) > MAX_CONTROLS:
            raise ValueError(f"{len(self.fields)} controls: at most {MAX_CONTROLS}, one question a panel.")
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}: label the figure as one of {', '.join(KINDS)}.")
        if unknown := set(confounders) - set(self.fields):
            raise ValueError(f"confounders {sorted(unknown)} are not among the controls {list(self.fields)}.")
        self.work, self.guess, self.results = run, guess, []
        self.runner = Runner(on_tick=self._tick, on_end=self._end)
        self.error, self.status = ErrorBox(), StatusLine()
        self.head, self.origin, self.figure, self.below = w.HTML(), w.HTML(), w.Output(), w.HTML()
        self.figure.add_class("lk-figure")
        self.run_button = controls.button("Run", guarded(self.error, self.start), primary=True)
        self.stop_button = controls.button("Stop", guarded(self.error, self.runner.stop))
        self.reset_button = controls.button("Reset", guarded(self.error, self.reset))
        self.stop_button.disabled = True
        for name in confounders:
            self.fields[name].observe_value(guarded(self.error, self._clear))
        sub = f'<div class="lk-sub">{html.prose(say(note))}</div>' if note else ""
        self._kind, self._title = kind, f'<div class="lk-title">{html.prose(say(question))}</div>{sub}'
        self.widget = controls.stack(
            self.head,
            *([controls.row(*self.fields.values())] if self.fields else []),
            controls.row(self.run_button, self.stop_button, self.reset_button, self.status, middle=True),
            self.error,
            self.origin,
            self.figure,
            self.below,
            panel=True,
        )
        self._drawn: Result | None = None
        self._drawn_s = 0.0
        self._recorded, self._recording = recorded, None
        self._face: ExperimentJob | None = None
        self.status.set("idle", "Ready.")
        self._show_recording()
        if guess is not None:
            guess.when_settled(self._redraw)

    @property
    def values(self) -> dict[str, Any]:
        """What the controls say now, by name."""
        return {name: field.value for name, field in self.fields.items()}

    def start(self) -> None:
        """What the Run button does."""
        self.error.clear()
        values = self.values
        history = [result.data for result in self.results]

        def work(job: Job) -> Result:
            face = self._face = ExperimentJob(job, history)
            return self.work(face, **values)

        if self.runner.running:
            return
        if self._recording is not None:
            self._clear()
        self._lock(True)
        self.status.set("running", "Running ...")
        self.runner.start(work)

    def stop(self) -> None:
        self.runner.stop()

    def reset(self) -> None:
        """Stop, put the controls back, forget the results."""
        self.runner.stop()
        for control in self.fields.values():
            control.reset()
        self._clear()
        self._show_recording()
        self.error.clear()
        self.status.set("idle", "Ready.")

    def wait(self, timeout: float | None = 120.0) -> Result | None:
        """Wait for the end: the Result (None when stopped), or the run's exception raised here."""
        return self.runner.wait(timeout)

    def _clear(self) -> None:
        self.results.clear()
        self._drawn = None
        self.figure.outputs = ()
        self.origin.value = self.below.value = ""
        self._say_kind(None)

    def _say_kind(self, found: Recording | None) -> None:
        """What the figure is: of this machine, or the recording ``found``."""
        self._recording = found
        kind = KINDS[self._kind if found is None else "recorded"]
        self.head.value = f'<div class="lk-eyebrow">{say("Run")} · {say(kind)}</div>{self._title}'

    def _show_recording(self) -> None:
        found = recording(self._recorded[0]) if self._recorded else None
        self._say_kind(found)
        if found is not None and self._recorded:
            self._draw(self._recorded[1](found.data))

    def _lock(self, running: bool) -> None:
        self.run_button.disabled = running
        self.stop_button.disabled = not running
        for control in self.fields.values():
            control.set_disabled(running)

    def _tick(self, job: Job) -> None:
        self.status.set("running", job.message or "Running ...", job.fraction, job.elapsed_s)
        face = self._face
        if face and face._shown is not None and face._shown is not self._drawn and job.elapsed_s - self._drawn_s > 0.2:
            self._drawn_s = job.elapsed_s
            self._draw(face._shown)

    def _end(self, job: Job) -> None:
        try:
            self._conclude(job)
        finally:
            self._lock(False)

    def _conclude(self, job: Job) -> None:
        self._drawn_s = 0.0
        if job.error is not None:
            self.error.show(job.error)
            self.status.set("error", "It did not work; the box below says why. Your settings are kept.")
            if under_test() and in_foreground():
                raise job.error
            return
        if job.stopped:
            self.status.set("stopped", say("Stopped after {took:.1f} s. Run starts again.", took=job.elapsed_s))
        else:
            self.status.set("done", say("Done in {took:.1f} s.", took=job.elapsed_s))
        if isinstance(job.result, Result):
            self.results.append(job.result)
            self._draw(job.result)

    def _redraw(self) -> None:
        """The guess came or changed: what was measured before it may be shown now, with the guess in it."""
        if self._drawn is not None:
            self._draw(self._drawn)

    def _draw(self, result: Result) -> None:
        self._drawn = result
        if self.guess is not None and not self.guess.settled:
            self.below.value = f'<div class="lk-note" role="status">{html.prose(say(WAITING))}</div>'
            return
        self.origin.value = self._recording.note() if self._recording else ""
        if result.figure is not None:
            figure = with_guess(result, self.guess)
            self.figure.layout.min_height = f"{figure.layout.height or 450}px"  # plotly forgets it in a resized page
            self.figure.outputs = (figure_output(figure, result.summary),)
        summary = f'<div style="margin-top:4px">{html.prose(result.summary)}</div>' if result.summary else ""
        twin = ""
        if len(result.rows):
            table = html.table(result.rows, result.caption)
            twin = f'<details class="lk-twin"><summary>{say("The figure as a table")}</summary>{table}</details>'
        self.below.value = summary + result.extra + twin

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.widget)


def with_guess(result: Result, guess: Any) -> Any:
    """The figure with the reader's guess in it: where the result knows its place, else in words at the top."""
    if getattr(guess, "guess", None) is None:
        return result.figure
    figure = deepcopy(result.figure)
    if result.mark_guess is not None:
        result.mark_guess(figure, guess.guess)
    else:
        words = say("your guess: {guess}", guess=escape(guess.text))
        place: dict[str, Any] = {"x": 1, "y": 1, "xref": "paper", "yref": "paper", "xanchor": "right"}
        figure.add_annotation(text=words, showarrow=False, yanchor="bottom", **place)
    return figure


def figure_output(figure: Any, summary: str = "") -> dict[str, Any]:
    """A plotly figure as one display message, drawn by the page's own plotly: no CDN, no second copy of it."""
    import json
    import os

    spec = fit(json.loads(figure.to_json()))
    if os.environ.get("COLAB_NOTEBOOK_ID"):
        whole = type(figure)(spec).to_html(full_html=False, include_plotlyjs="cdn")
        data: dict[str, Any] = {"text/html": whole}
    else:
        spec["config"] = {"displayModeBar": False, "responsive": True}
        data = {"application/vnd.plotly.v1+json": spec}
    return {"output_type": "display_data", "data": {**data, "text/plain": summary or "figure"}, "metadata": {}}
