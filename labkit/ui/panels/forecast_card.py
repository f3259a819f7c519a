"""Beside what was measured: the reader's guess, the floor that physics sets, and what labkit forecasts."""

from __future__ import annotations

from typing import Any

import ipywidgets as w

from labkit.perf import hardware
from labkit.perf.forecast import Forecast, forecast
from labkit.perf.probe import Engine
from labkit.run import Completion
from labkit.ui import controls, html
from labkit.ui.errors import ErrorBox, guarded
from labkit.ui.panels.switches import Settings
from labkit.ui.phase_bars import duration
from labkit.ui.predict import as_number
from labkit.ui.runner import Job, Runner
from labkit.ui.status import StatusLine
from labkit.ui.words import say

WHAT = (
    "What should this run have taken? The floor is bytes / bandwidth and FLOPs / peak of this machine; the forecast is "
    "what this engine reaches of it."
)
BOUND = {
    "memory": "Decode is bound by reading memory here.",
    "compute": "Decode is bound by arithmetic here.",
    "overhead": "Decode is bound by overhead here.",
}


class ForecastCard:
    """An extra of the switchboard. The first forecast of an engine measures the machine (some 10 to 60 s, once;
    the result is kept in labkit's cache folder); later runs with the same engine are compared at once."""

    def __init__(self) -> None:
        self.config: Any = None
        self.engine: Engine | None = None
        self.completion: Completion | None = None
        self.forecast: Forecast | None = None
        self._measured: set[str] = set()
        self.error, self.status, self.out = ErrorBox(), StatusLine(), w.HTML()
        self.guess = controls.text("Your guess, tok/s", rows=1, placeholder="a number", width="150px")
        self.button = controls.button("Forecast", guarded(self.error, self.start))
        self.runner = Runner(on_tick=self._tick, on_end=self._end)
        title = w.HTML(
            f'<div class="lk-stage-name">{say("Guess, floor, forecast")}</div><div class="lk-help">{say(WHAT)}</div>'
        )
        line = controls.row(self.guess, self.button, self.status)
        line.add_class("lk-baseline")
        self.widget = controls.stack(title, line, self.error, self.out)
        self.widget.add_class("lk-history")
        self.button.disabled = True
        self.status.set("idle", "Run something first.")

    def started(self, settings: Settings, model: Any) -> None:
        self.config, self.weights = model.config, model.weights

    def finished(self, settings: Settings, completion: Completion) -> None:
        meta = completion.trace.meta
        self.completion, self.forecast = completion, None
        device = str(meta["device"]).split(":")[0]
        cache = settings.pipeline["kv_cache"]
        self.engine = Engine(meta["backend"], self.weights, meta["dtype"], cache, device)
        self.button.disabled = completion.trace.n_tokens == 0
        self.out.value = ""
        if self.button.disabled:
            self.status.set("idle", "No token came, so there is nothing to compare.")
        elif self.engine.label() in self._measured:
            self.start()
        else:
            self.status.set("idle", "The first forecast measures this machine for up to a minute.")

    def start(self) -> None:
        """What the button does."""
        self.error.clear()
        as_number(self.guess.value)  # a guess that is no number is told before anything is measured
        if self.runner.running or self.engine is None:
            return
        self.button.disabled = True
        self.status.set("running", "Measuring ...")
        self.runner.start(self._work)

    def wait(self, timeout: float | None = 300.0) -> Forecast:
        return self.runner.wait(timeout)

    def _work(self, job: Job) -> Forecast:
        engine, completion = self.engine, self.completion
        assert engine is not None
        assert completion is not None
        trace = completion.trace
        machine = hardware.machine(engine.device, progress=job.progress)
        return forecast(
            self.config,
            engine,
            n_prompt_tokens=trace.n_prompt_tokens,
            n_new_tokens=trace.n_tokens,
            machine=machine,
            progress=job.progress,
        )

    def _tick(self, job: Job) -> None:
        self.status.set("running", job.message or "Measuring ...", job.fraction, job.elapsed_s)

    def _end(self, job: Job) -> None:
        self.button.disabled = False
        if job.error is not None:
            self.error.show(job.error)
            self.status.set("error", "No forecast for this engine; the box says why.")
            return
        if isinstance(job.result, Forecast) and self.completion is not None and self.engine is not None:
            self.forecast = job.result
            self._measured.add(self.engine.label())
            self.out.value = html.table(self.rows(job.result, self.completion), "Predicted and measured")
            self.status.set("done", say(BOUND[job.result.decode.bound]))

    def rows(self, found: Forecast, completion: Completion) -> list[dict[str, str]]:
        """TTFT, time per token and speed: guess, floor, forecast with its interval, measured."""
        figures = completion.trace.summary()
        guess = as_number(self.guess.value)
        rows = []
        for name, stage, key in (
            ("time to first token", found.prefill, "ttft_ms"),
            ("time per token", found.decode, "itl_median_ms"),
        ):
            time = stage.time
            measured = figures[key]
            rows.append(
                {
                    "": say(name),
                    "your guess": duration(1 / guess) if guess and stage is found.decode else "–",
                    "floor": duration(stage.floor_s),
                    "forecast": say("{value} ({low} to {high})", **_interval(time)),
                    "measured": "–" if measured is None else duration(measured / 1e3),
                }
            )
        rows.append(
            {
                "": "tok/s",
                "your guess": html.number(guess),
                "floor": say("at most {speed}", speed=html.number(1 / found.decode.floor_s))
                if found.decode.floor_s
                else "–",
                "forecast": html.number(found.decode_tok_s),
                "measured": html.number(figures["decode_tok_s"]),
            }
        )
        return rows


def _interval(time: Any) -> dict[str, str]:
    return {name: duration(getattr(time, name)) for name in ("value", "low", "high")}
