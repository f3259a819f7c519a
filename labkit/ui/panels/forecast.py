"""The switchboard's second opinion: each phase's ceiling, forecast and measurement, and which switch would help.

    board = Switchboard(extras=[ForecastCard(), AdviceCard()])          # below the bars

The forecast stands beside the run and never in it. Rates that are not known yet are measured when a button asks for
them (seconds, once an engine), never while a run is timed.
"""

from __future__ import annotations

from typing import Any

import ipywidgets as w

from labkit.decoding.replay import replays
from labkit.perf import advice as advising
from labkit.perf import hardware
from labkit.perf import rates as rates_module
from labkit.perf.diagnosis import diagnose
from labkit.perf.drafting import Outlook
from labkit.perf.forecast import Forecast, forecast
from labkit.perf.probe import Engine, engine_of
from labkit.perf.trace import Trace
from labkit.run import Completion
from labkit.ui import controls
from labkit.ui.errors import ErrorBox, guarded
from labkit.ui.forecast_table import comparison, ranking, side_by_side, verdict
from labkit.ui.panels.switches import Settings
from labkit.ui.runner import Job, Runner
from labkit.ui.status import StatusLine
from labkit.ui.verdict_note import finding_note
from labkit.ui.words import say

WHAT = (
    "Each phase against this machine's ceilings; then every switch that there is here, forecast for the run you just "
    "saw and ranked."
)
GOALS = [("the whole run", "wall"), ("the first token", "ttft"), ("each later token", "itl"), ("memory", "memory")]


class AdviceCard:
    """An extra of the switchboard. ``forecast`` and ``advice`` hold the last ones; ``best_button`` runs the best."""

    def __init__(self) -> None:
        self.board: Any = None
        self.forecast: Forecast | None = None
        self.advice: advising.Advice | None = None
        self._model: Any = None
        self._engine: Engine | None = None
        self._trace: Trace | None = None
        self._ids: tuple[list[int], int] | None = None
        self._before: tuple[str, Forecast, Trace] | None = None
        self.error, self.status = ErrorBox(), StatusLine()
        self.runner = Runner(on_tick=self._tick, on_end=self._end)
        self.diagnosis, self.table, self.ranking, self.side_by_side = w.HTML(), w.HTML(), w.HTML(), w.HTML()
        self.goal = controls.choice("What matters", GOALS, "wall", width="190px")
        self.phases_button = controls.button("Phase by phase", guarded(self.error, self.explain))
        self.advise_button = controls.button("What would help?", guarded(self.error, self.advise))
        self.best_button = controls.button("Run the best", guarded(self.error, self.run_best), primary=True)
        title = w.HTML(
            f'<div class="lk-stage-name">{say("Which ceiling binds, and what would help")}</div>'
            f'<div class="lk-help">{say(WHAT)}</div>'
        )
        line = controls.row(self.phases_button, self.goal, self.advise_button, self.best_button)
        line.add_class("lk-baseline")
        children = (title, line, self.status, self.error, self.diagnosis, self.table, self.ranking, self.side_by_side)
        self.widget = controls.stack(*children)
        self.widget.add_class("lk-history")
        self._lock(False)
        self.status.set("idle", "Run something first.")

    # --- the switchboard's news ------------------------------------------------------------------------

    def attach(self, board: Any) -> None:
        """The switchboard that ``best_button`` sets and runs."""
        self.board = board

    def started(self, settings: Settings, model: Any) -> None:
        """Just before a run: forecast it, if this engine is known already."""
        self._model, self._trace, self.forecast = model, None, None
        self._engine = engine_of(model, kv_cache=settings.pipeline["kv_cache"], backend=settings.pipeline["backend"])

    def finished(self, settings: Settings, completion: Completion) -> None:
        """Explain at once when nothing needs measuring for it."""
        self._trace = completion.trace if completion.trace.n_tokens else None
        drafts = settings.pipeline.get("drafter") is not None
        self._ids = None if drafts else ([*completion.prompt_ids, *completion.token_ids], len(completion.prompt_ids))
        self._lock(False)
        self.table.value = self.diagnosis.value = ""
        if self._trace is None:
            self.status.set("idle", "No token came, so there is nothing to compare.")
        elif self._is_measured():
            self._explained(self._forecast(self._trace))
        else:
            self.status.set("idle", "The first time, an engine is measured: some seconds, more on a busy machine.")

    # --- what the buttons do ---------------------------------------------------------------------------

    def explain(self) -> None:
        """Forecast the last run, measuring the machine and the engine first if they are not known."""
        _, _, trace = self._subject()
        self._begin(lambda job: self._forecast(trace, job), "Measuring ...")

    def advise(self) -> None:
        """Forecast every other switch."""
        config, engine, trace = self._subject()
        goal, n_new, ids, model = self.goal.value, trace.n_tokens, self._ids, self._model

        def work(job: Job) -> advising.Advice:
            job.progress(0.0, "What drafters would have guessed of this text ...")
            seen = replays(model, *ids, backend=engine.backend, should_stop=job.stop_event.is_set) if ids else []
            return advising.what_would_help(
                config,
                engine,
                n_prompt_tokens=trace.n_prompt_tokens,
                n_new_tokens=n_new,
                goal=goal,
                outlooks=[Outlook(r.drafter, r.rounds, r.guess_s) for r in seen],
                progress=job.progress,
            )

        self._begin(work, "Forecasting every switch ...")

    def run_best(self) -> None:
        """Set the best switch on the board and press Run."""
        best = self.advice.best if self.advice else None
        if self.advice is None or best is None or self.board is None or self._trace is None:
            raise ValueError("there is nothing better to run: no switch gains more than a forecast can be wrong.")
        self._before = ("as it was", self.advice.now, self._trace)
        switches = self.board.switches
        for name, value in best.changes.items():
            control = {"dtype": switches.dtype, "weights": switches.weights.field}.get(name)
            (control or switches.pickers[name].field).value = value
        self.board.start()

    def wait(self, timeout: float | None = 300.0) -> Any:
        """Wait for a forecast or an advice under way; its result, or its exception raised here."""
        return self.runner.wait(timeout)

    # --- inside ----------------------------------------------------------------------------------------

    def _subject(self) -> tuple[Any, Engine, Trace]:
        if self._model is None or self._engine is None or self._trace is None:
            raise ValueError("there is no run to explain yet: press Run first.")
        return self._model.config, self._engine, self._trace

    def _is_measured(self) -> bool:
        config, engine, _ = self._subject()
        return hardware.is_measured(engine.device) and rates_module.is_measured(config, engine)

    def _forecast(self, trace: Trace, job: Job | None = None) -> Forecast:
        config, engine, _ = self._subject()
        return forecast(
            config,
            engine,
            n_prompt_tokens=trace.n_prompt_tokens,
            n_new_tokens=trace.n_tokens,
            progress=job.progress if job else None,
        )

    def _begin(self, work: Any, words: str) -> None:
        if self.runner.running or (self.board is not None and self.board.runner.running):
            raise ValueError("something is still running here: wait for it, or press Stop above.")
        self.error.clear()
        self._lock(True)
        self.status.set("running", words)
        self.runner.start(work)

    def _lock(self, running: bool) -> None:
        self.phases_button.disabled = self.advise_button.disabled = running or self._trace is None
        self.best_button.disabled = running or self.advice is None or self.advice.best is None

    def _tick(self, job: Job) -> None:
        self.status.set("running", job.message or "Working ...", job.fraction, job.elapsed_s)

    def _end(self, job: Job) -> None:
        if isinstance(job.result, advising.Advice):
            self.advice = job.result
            self.ranking.value = ranking(self.advice)
            best = self.advice.best
            nothing = "No switch gains more than a forecast can be wrong."
            words = say("Best: {switch}.", switch=best.label) if best else say(nothing)
            self.status.set("done", words)
        self._lock(False)
        if job.error is not None:
            self.error.show(job.error)
            self.status.set("error", "It did not work; the box says why.")
        elif isinstance(job.result, Forecast):
            self._explained(job.result)

    def _explained(self, found: Forecast) -> None:
        _, _, trace = self._subject()
        self.forecast = found
        self.table.value = comparison(found, trace)
        self.diagnosis.value = finding_note(diagnose(trace, model=self._model, machine=found.machine, say=say))
        self.status.set("done", verdict(found, trace))
        if self._before is not None:
            self.side_by_side.value = side_by_side(*self._before, found, trace)
            self._before = None
