"""Loading a model beside the page: begun when a switch asks for another, waited for by the run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from labkit import registry
from labkit.perf import workers
from labkit.ui.runner import Job, Runner, Stopped
from labkit.ui.session import DEFAULT_MODEL, shelf
from labkit.ui.words import say

POLL_S = 0.05


class ModelLoader:
    """Loads what it was asked for last. ``on_change()`` is called when its words change."""

    def __init__(self, on_change: Callable[[ModelLoader], None]) -> None:
        self.error: Exception | None = None
        self.loading = False
        self._on_change = on_change
        self._lock = threading.Lock()
        self._wanted: dict[str, Any] = {}
        self._calibrating = ""
        self._runner = Runner(on_tick=lambda job: on_change(self), on_end=self._end)

    @property
    def words(self) -> str:
        """What it is doing, for the status line."""
        job = self._runner.job
        name = self._wanted.get("name", say("the model"))
        if self._calibrating:
            return self._calibrating
        taken = f" ({job.elapsed_s:.0f} s)" if job and job.elapsed_s >= 1 else ""
        return say(_first_words(name), model=f"{name}{_how(self._wanted)}") + taken

    def request(self, options: dict[str, Any]) -> None:
        """Begin to load, unless it is at hand. A request during a load is served after it. What would take a
        calibration first waits for Run: choosing a line of a menu is not asking for minutes of work."""
        with self._lock:
            self._wanted = dict(options)
            if shelf.holds(**options) or _calibrates(options):
                return
        self.error, self.loading = None, True
        self._runner.start(self._load)

    def get(self, options: dict[str, Any], job: Job) -> Any:
        """The model for a run. Waits, stoppable, for a load; raises what the load raised."""
        if not shelf.holds(**options):
            self._wanted = dict(options)
        done, box = threading.Event(), []

        def told(share: float, words: str) -> None:
            self._calibrating = words
            if job.stopped:
                raise Stopped

        def fetch() -> None:
            try:
                box.append(shelf.get(progress=told if _calibrates(options) else None, **options))
            except BaseException as error:  # noqa: BLE001 - raised below, in the run
                box.append(error)
            done.set()

        if shelf.holds(**options) or job.foreground:
            return shelf.get(**options)
        workers.begin(fetch, name="labkit-load", stop=job.stop_event.set)
        try:
            while not done.wait(POLL_S):
                job.progress(-1.0, self.words)
        finally:
            self._calibrating = ""
        if isinstance(box[0], BaseException):
            raise box[0]
        return box[0]

    def _load(self, job: Job) -> Any:
        while True:
            wanted = dict(self._wanted)
            model = shelf.get(**wanted)
            if wanted == self._wanted:
                return model

    def _end(self, job: Job) -> None:
        self.loading = False
        self.error = job.error if isinstance(job.error, Exception) else None
        self._on_change(self)


def model_for(job: Job, **options: Any) -> Any:
    """The page's model for a panel's run, loaded if it is not at hand; Stop does not wait for it."""
    return ModelLoader(lambda loader: None).get(options, job)


def _calibrates(options: dict[str, Any]) -> bool:
    weights = options.get("weights")
    return weights is not None and bool(getattr(registry.find("weights", weights)[1], "calibrates", False))


def _how(options: dict[str, Any]) -> str:
    parts = [options["dtype"] if options.get("dtype") not in (None, "auto") else "", str(options.get("weights") or "")]
    said = ", ".join(part for part in parts if part)
    return f" ({said})" if said else ""


def _first_words(name: str) -> str:
    from labkit.checkpoint.fetch import cached_path

    if name == DEFAULT_MODEL and cached_path() is None:
        return "Fetching (93 MB, once) and loading {model} ..."
    return "Loading {model} ..."
