"""The switchboard's forecast: what a run should take, what it took, and which switch would help.

    board = forecast.board(prompt="story"); board          # the switchboard with this below its bars

The forecast is made before the run and never changed by it. The ceilings and the engine's rates are measured on
request (seconds, once), because measuring while the board stands idle would slow the page for nobody's benefit.
"""

from __future__ import annotations

from typing import Any

import ipywidgets as w

from labkit.perf import advice as advising
from labkit.perf import hardware
from labkit.perf import rates as rates_module
from labkit.perf.forecast import Forecast, forecast
from labkit.perf.probe import Engine, engine_of
from labkit.perf.trace import Trace
from labkit.run import Completion
from labkit.ui import controls
from labkit.ui.errors import ErrorBox, guarded
from labkit.ui.forecast_table import comparison, ranking, side_by_side, verdict
from labkit.ui.panels.switchboard import Switchboard
from labkit.ui.panels.switches import Settings
from labkit.ui.runner import Job, Runner
from labkit.ui.status import StatusLine

GOALS = [("the whole run", "wall"), ("the first token", "ttft"), ("each later token", "itl"), ("memory", "memory")]


class ForecastExtra:
    """What stands below the switchboard's bars. ``forecast`` and ``advice`` hold the last ones made."""

    def __init__(self) -> None:
        self.board: Switchboard | None = None
        self.forecast: Forecast | None = None
        self.advice: advising.Advice | None = None
        self._model: Any = None
        self._engine: Engine | None = None
        self._n_prompt_tokens, self._n_new_tokens = 1, 2
        self._before: tuple[str, Forecast, Trace] | None = None
        self.error, self.status = ErrorBox(), StatusLine()
        self.runner = Runner(on_tick=self._tick, on_end=self._end)
        self.table, self.ranking, self.side_by_side = w.HTML(), w.HTML(), w.HTML()
        self.guesses = {
            "prefill": controls.number("Your guess: first token, ms", 0.0, low=0, high=1e7, width="190px"),
            "decode": controls.number("Your guess: a later token, ms", 0.0, low=0, high=1e7, width="190px"),
        }
        self.goal = controls.choice("What matters", GOALS, "wall", width="190px")
        self.measure_button = controls.button("Measure this machine", guarded(self.error, self.measure))
        self.advise_button = controls.button("What would help?", guarded(self.error, self.advise))
        self.best_button = controls.button("Run the best", guarded(self.error, self.run_best), primary=True)
        self.best_button.disabled = self.advise_button.disabled = True
        head = w.HTML(
            '<div class="lk-eyebrow">Forecast</div>'
            '<div class="lk-title">What should this run take, and what would make it faster?</div>'
        )
        guesses = controls.row(*self.guesses.values())
        buttons = controls.row(self.measure_button, self.goal, self.advise_button, self.best_button)
        children = (head, guesses, self.table, buttons, self.status, self.error, self.ranking, self.side_by_side)
        self.widget = controls.stack(*children)
        self.widget.add_class("lk-group")
        self.status.set("idle", "Run once; then this machine can be measured for a forecast (seconds, once).")

    # --- the switchboard's news ------------------------------------------------------------------------

    def started(self, settings: Settings, model: Any) -> None:
        """Just before a run: forecast it, if this engine has been measured before."""
        self._remember(settings, model)
        self.forecast = self._forecast_if_measured()

    def finished(self, settings: Settings, completion: Completion) -> None:
        """Put the measurement beside the forecast that was made before it."""
        self.advise_button.disabled = False
        if self.forecast is None:
            self.table.value = ""
            self.status.set("idle", "Not forecast: this engine has not been measured here. Measure, then run again.")
            return
        self.table.value = comparison(
            self.forecast, completion.trace, {name: field.value for name, field in self.guesses.items()}
        )
        self.status.set("done", verdict(self.forecast, completion.trace))
        if self._before is not None:
            self.side_by_side.value = side_by_side(*self._before, self.forecast, completion.trace)
            self._before = None

    # --- what the buttons do ---------------------------------------------------------------------------

    def measure(self) -> None:
        """Measure the ceilings and this engine's rates again; the next run is forecast from them."""
        config, engine = self._subject()

        def work(job: Job) -> None:
            hardware.machine(engine.device, refresh=True, progress=_half(job, 0.0))
            rates_module.rates(config, engine, refresh=True, progress=_half(job, 0.5))

        self._begin(work, "Measuring ...")

    def advise(self) -> None:
        """Forecast every other switch."""
        config, engine = self._subject()
        goal, n_prompt, n_new = self.goal.value, self._n_prompt_tokens, self._n_new_tokens

        def work(job: Job) -> advising.Advice:
            return advising.what_would_help(
                config, engine, n_prompt_tokens=n_prompt, n_new_tokens=n_new, goal=goal, progress=job.progress
            )

        self._begin(work, "Forecasting every switch; engines not seen before are measured first ...")

    def run_best(self) -> None:
        """Set the best switch on the board and press Run."""
        best = self.advice.best if self.advice else None
        if best is None or self.board is None:
            raise ValueError("there is nothing better to run: no switch gains more than a forecast can be wrong.")
        completion = self.board.completion
        if self.forecast is not None and completion is not None:
            self._before = ("as it was", self.forecast, completion.trace)
        switches = self.board.switches
        for name, value in best.changes.items():
            if name == "dtype":
                switches.dtype.value = value
            elif name == "weights":
                switches.weights.field.value = value
            else:
                switches.pickers[name].field.value = value
        self.board.start()

    def wait(self, timeout: float | None = 300.0) -> Any:
        """Wait for a measurement or an advice under way."""
        return self.runner.wait(timeout)

    # --- inside ----------------------------------------------------------------------------------------

    def _subject(self) -> tuple[Any, Engine]:
        if self._model is None or self._engine is None:
            raise ValueError("run the switchboard once first: a forecast is about a run.")
        return self._model.config, self._engine

    def _remember(self, settings: Settings, model: Any) -> None:
        text = settings.prompt
        if settings.chat:
            text = model.tokenizer.apply_chat_template([{"role": "user", "content": text}])
        n_prompt = max(1, len(model.tokenizer.encode(text)))
        room = model.config.context_tokens - n_prompt + 1
        self._n_prompt_tokens, self._n_new_tokens = n_prompt, max(1, min(settings.max_new_tokens, room))
        self._model = model
        self._engine = engine_of(model, kv_cache=settings.pipeline["kv_cache"], backend=settings.pipeline["backend"])

    def _forecast_if_measured(self) -> Forecast | None:
        config, engine = self._subject()
        if not (hardware.is_measured(engine.device) and rates_module.is_measured(config, engine)):
            return None
        return forecast(config, engine, n_prompt_tokens=self._n_prompt_tokens, n_new_tokens=self._n_new_tokens)

    def _begin(self, work: Any, words: str) -> None:
        if self.runner.running or (self.board is not None and self.board.runner.running):
            raise ValueError("something is still running here: wait for it, or press Stop above.")
        self._lock(True)
        self.status.set("running", words)
        self.runner.start(work)

    def _lock(self, running: bool) -> None:
        self.measure_button.disabled = self.advise_button.disabled = running
        self.best_button.disabled = running or self.advice is None or self.advice.best is None

    def _tick(self, job: Job) -> None:
        self.status.set("running", job.message or "Working ...", job.fraction)

    def _end(self, job: Job) -> None:
        if isinstance(job.result, advising.Advice):
            self.advice = job.result
            self.ranking.value = ranking(self.advice)
        self._lock(False)
        if job.error is not None:
            self.error.show(job.error)
            self.status.set("error", "It did not work; the box says why.")
        elif self.advice is not None and job.result is self.advice:
            best = self.advice.best
            words = f"Best: {best.label}." if best else "No switch gains more than a forecast can be wrong."
            self.status.set("done", words)
        else:
            self.status.set("done", f"{hardware.machine(self._subject()[1].device).describe()} Run again to see it.")


def board(*, prompt: str = "first", max_new_tokens: int = 64, **options: Any) -> Switchboard:
    """The switchboard with its forecast; ``board.extras[0]`` is the ``ForecastExtra``."""
    extra = ForecastExtra()
    made = Switchboard(prompt=prompt, max_new_tokens=max_new_tokens, extras=(extra,), **options)
    extra.board = made
    return made


def _half(job: Job, start: float) -> Any:
    return lambda share, what: job.progress(start + share / 2, what)
