"""The switchboard: a prompt, every switch of the pipeline, and where each millisecond of the run goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import ipywidgets as w

import labkit
from labkit.run import Completion, Run
from labkit.ui import controls, html
from labkit.ui.errors import ErrorBox, guarded, under_test
from labkit.ui.machine import this_machine
from labkit.ui.model_loader import ModelLoader
from labkit.ui.panels.switches import Settings, Switches
from labkit.ui.phase_bars import PhaseBars, duration, phase_rows
from labkit.ui.recorded import completion_of, recording
from labkit.ui.run_history import RunHistory
from labkit.ui.run_tiles import tiles
from labkit.ui.runner import Job, Runner
from labkit.ui.session import shelf
from labkit.ui.status import StatusLine
from labkit.ui.words import counted, say, sentences

WHAT = "A real model answers; the bars show where each millisecond goes."


class Extra(Protocol):
    """Something more on the board, such as a forecast: its widget stands below the figures."""

    widget: Any

    def started(self, settings: Settings, model: Any) -> None:
        """A run begins with these switches."""

    def finished(self, settings: Settings, completion: Completion) -> None:
        """It has ended."""


class Switchboard:
    """The panel. Display it as a cell's last line; ``run_button.click()`` and ``wait()`` drive it from code.

    ``completion`` is the last run's; ``history`` holds the last six. ``extras`` add to the board.
    """

    def __init__(
        self, *, prompt: str = "first", max_new_tokens: int = 64, extras: Sequence[Extra] = (), preload: bool = True
    ) -> None:
        self.error, self.status, self.bars, self.origin = ErrorBox(), StatusLine(), PhaseBars(), w.HTML()
        self._recorded = f"switchboard-{prompt}"
        self.history, self.extras = RunHistory(), tuple(extras)
        self.completion: Completion | None = None
        self._run: Run | None = None
        self._settings: Settings | None = None
        self.loader = ModelLoader(self._loading)
        self.runner = Runner(on_tick=self._tick, on_end=self._end)
        self.switches = Switches(
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            on_load_change=self._request_model,
            on_prompt_change=self._count_tokens,
            guard=lambda callback: guarded(self.error, callback),
        )
        self.run_button = controls.button("Run", guarded(self.error, self.start), primary=True)
        self.stop_button = controls.button("Stop", guarded(self.error, self.stop))
        self.reset_button = controls.button("Reset", guarded(self.error, self.reset))
        self.stop_button.disabled = True
        self.table, self.runs = w.HTML(), w.HTML()
        self.widget = self._arrange()
        for extra in self.extras:
            attach = getattr(extra, "attach", None)
            if attach is not None:
                attach(self)
        self._ready()
        self._count_tokens()
        if preload:
            self._request_model()

    # --- what the buttons do ---------------------------------------------------------------------------

    def start(self) -> None:
        """Run with the switches as they stand."""
        if self.runner.running:
            return
        self.error.clear()
        settings = self._settings = self.switches.read()
        self._run = None
        self._lock(True)
        self.origin.value = ""
        self.bars.show(None, text="", prompt=said_before(settings), running=True, tiles=tiles(None))
        self.status.set("running", "Starting ...")
        self.runner.start(lambda job: self._work(job, settings))

    def stop(self) -> None:
        self.runner.stop()
        if self._run is not None:
            self._run.stop()

    def reset(self) -> None:
        """Stop, every switch back to where it was, the runs forgotten."""
        self.stop()
        self.switches.reset()
        self.history.clear()
        self.completion = None
        self.error.clear()
        self.runs.value = self.table.value = ""
        self._ready()

    def wait(self, timeout: float | None = 120.0) -> Completion:
        """Wait for the run to end; its completion, or its exception raised here."""
        return self.runner.wait(timeout)

    # --- a run -------------------------------------------------------------------------------------------

    def _work(self, job: Job, settings: Settings) -> Completion:
        """In the background: the model, the pipeline, the run."""
        model = self.loader.get(settings.load, job)
        pipeline = labkit.Pipeline(model, **settings.pipeline)
        job.check()
        for extra in self.extras:
            extra.started(settings, model)
        run = self._run = pipeline.run(
            settings.prompt, max_new_tokens=settings.max_new_tokens, chat=settings.chat, seed=settings.seed
        )
        if job.stopped:
            run.stop()
        try:
            for _ in run:
                job.tick()
        except KeyboardInterrupt:
            job.stop_event.set()
        return run.result()

    def _tick(self, job: Job) -> None:
        """Every 100 ms: the latest state, in one message."""
        run = self._run
        if run is None:
            self.status.set("loading" if job.message else "running", job.message or "Starting ...", -1, job.elapsed_s)
            return
        trace = run.snapshot()
        self._draw(trace, run.text, running=True)
        n, most = trace.n_tokens, self._settings.max_new_tokens if self._settings else 1
        if n:
            self.status.set("running", "Decoding", n / most, job.elapsed_s)
        else:
            self.status.set("running", _reading(trace.n_prompt_tokens), -1, job.elapsed_s)

    def _end(self, job: Job) -> None:
        """The picture and the word first, so that Stop is seen at once; then what takes a little longer."""
        try:
            self._conclude(job)
        finally:
            self._lock(False)

    def _conclude(self, job: Job) -> None:
        completion, settings = job.result, self._settings
        if job.error is not None:
            self._draw_empty(running=False)
            self.error.show(job.error)
            self.status.set("error", "It did not run; the box says why. Nothing you set is lost.")
            if under_test() and job.foreground:
                raise job.error
            return
        if completion is None or settings is None:
            self._draw_empty(running=False)
            self.status.set("stopped", "Stopped.")
            return
        self.completion = completion
        self._draw(completion.trace, completion.text, running=False)
        self.status.set(*_ending(completion))
        self.history.add(settings.words, completion)
        self.runs.value = self.history.html()
        rows = html.table(phase_rows(completion.trace), "Exclusive milliseconds by phase; together they are the run")
        self.table.value = f'<details class="lk-twin"><summary>{say("The bars as a table")}</summary>{rows}</details>'
        for extra in self.extras:
            extra.finished(settings, completion)

    def _draw(self, trace: Any, text: str, *, running: bool) -> None:
        self.bars.show(trace, text=text, prompt=said_before(self._settings), running=running, tiles=tiles(trace))

    def _draw_empty(self, *, running: bool) -> None:
        self.bars.show(None, text="", prompt=said_before(self._settings), running=running, tiles=tiles(None))

    # --- the model and the prompt ---------------------------------------------------------------------

    def _request_model(self) -> None:
        self.loader.request(self.switches.load_options)
        self._loading(self.loader)

    def _loading(self, loader: ModelLoader) -> None:
        """The loader's news, unless a run has the status line."""
        if self.runner.running:
            return
        if loader.loading:
            self.status.set("loading", loader.words)
        elif loader.error is not None:
            self.error.show(loader.error)
            self.status.set("error", "The model could not be loaded; the box says why.")
        else:
            self._ready()
            self._count_tokens()

    def _count_tokens(self) -> None:
        """How long the prompt is, once there is a tokenizer at hand to say so."""
        options = self.switches.load_options
        model = shelf.peek(**options)
        text = self.switches.prompt.value
        if model is None or not text:
            self.switches.say_tokens(None, None)
            return
        chat = self.switches.chat.value
        if chat:
            text = model.tokenizer.apply_chat_template([{"role": "user", "content": text}])
        self.switches.say_tokens(len(model.tokenizer.encode_prompt(text, chat=chat)), model.config.context_tokens)

    def _ready(self) -> None:
        """At rest; before the first run with one that was recorded, and says so."""
        found = recording(self._recorded) if self.completion is None else None
        if found is None:
            self.bars.show(None, text="", prompt="", running=False, tiles=tiles(None))
        else:
            run = completion_of(found.data["run"])
            prompt, parts = found.data["prompt"], {"running": False, "tiles": tiles(run.trace)}
            self.bars.show(run.trace, text=run.text, prompt=prompt, **parts)
        self.origin.value = found.note() if found else ""
        self.status.set("idle", "Ready.")

    # --- the look -------------------------------------------------------------------------------------

    def _lock(self, running: bool) -> None:
        self.run_button.disabled = running
        self.stop_button.disabled = not running
        self.switches.set_disabled(running)

    def _arrange(self) -> w.Box:
        machine = this_machine()
        where = machine.gpu or counted(machine.n_cores, "{cpu}, {n} core", "{cpu}, {n} cores", cpu=machine.cpu)
        head = w.HTML(
            f'<div class="lk-head"><div><div class="lk-title" style="font-size:22px">{say("Switchboard")}</div>'
            f'<div class="lk-sub">{say(WHAT)}</div></div>'
            f'<span class="lk-tag">{html.prose(where)}</span></div>'
        )
        answer = controls.stack(
            controls.row(self.run_button, self.stop_button, self.reset_button, self.status, middle=True),
            self.error,
            self.origin,
            self.bars,
            *(extra.widget for extra in self.extras),
            self.table,
        )
        areas = {"lk-ask": self.switches.ask, "lk-answering": answer, "lk-switches": self.switches.widget}
        for name, area in areas.items():
            area.add_class(name)
        columns = w.Box(list(areas.values()))
        columns.add_class("lk-columns")
        return controls.stack(head, columns, self.runs, panel=True)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.widget)


def said_before(settings: Settings | None, n_characters: int = 240) -> str:
    """The prompt's end, as the text that the answer follows: below a question, on the line of a text."""
    if settings is None:
        return ""
    prompt = settings.prompt
    shown = prompt if len(prompt) <= n_characters else "… " + prompt[-n_characters:]
    return shown + "\n" if settings.chat else shown


def _reading(n_tokens: int) -> str:
    if not n_tokens:
        return say("Prefill: reading the prompt")
    return counted(n_tokens, "Prefill: reading the prompt's one token", "Prefill: reading the prompt's {n:,} tokens")


def _ending(completion: Completion) -> tuple[str, str]:
    trace, meta = completion.trace, completion.trace.meta
    took = counted(trace.n_tokens, "{n} token in {took}", "{n} tokens in {took}", took=duration(trace.wall_s))
    if completion.finish_reason == "cancelled":
        return "stopped", say("Stopped after {took}.", took=took)
    ended, full = "Done: {took}; the model ended its answer.", "Done: {took}; the length you allowed is reached."
    done = say(ended, took=took) if completion.finish_reason == "stop" else say(full, took=took)
    covered = say("{share:.1f} % of the time is in a named phase.", share=100 * trace.coverage)
    why = {"backend": meta.get("computed_by"), "reason": say(meta.get("backend_note") or "")}
    note = say("Computed by {backend}: {reason}.", **why) if meta.get("backend_note") else ""
    return "done", sentences(done, covered, note)
