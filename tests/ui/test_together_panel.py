"""The page whose visitors share one engine: what it shows is what the engine said, and a full engine is a sentence."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from labkit.diagnose.endpoint import ServerError
from labkit.serving.remote import ENGINE_VARIABLE
from labkit.ui.panels import together
from tests.serving.conftest import _one_thread, _reading, model  # noqa: F401 - fixtures
from tests.serving.test_http import KEY, service, until, url  # noqa: F401 - fixtures


class Job:
    def __init__(self) -> None:
        self.shown, self.history, self.stopped = [], [], False

    def progress(self, *_):
        pass

    def check(self):
        pass

    def show(self, result):
        self.shown.append(result)


@pytest.fixture
def engine(url, monkeypatch):  # noqa: F811
    monkeypatch.setenv(ENGINE_VARIABLE, url)
    monkeypatch.setenv("LABKIT_API_KEY", KEY)


def test_several_visitors_are_served_by_one_engine(engine, service):  # noqa: F811
    n_before = len(service.requests)
    with ThreadPoolExecutor(3) as visitors:
        found = list(visitors.map(lambda n: together.measure(Job(), prompt=f"Hello {n}", n_tokens=8), range(3)))
    assert len(service.requests) == n_before + 3
    assert all(0 < result.data["tokens"] <= 8 for result in found)
    # Two run together there: of three, one has waited for another.
    assert max(result.data["waited for others, ms"] for result in found) > 0
    assert "request 1" in str(found[0].figure)


def test_a_full_engine_refuses_in_a_sentence(engine, service, monkeypatch):  # noqa: F811
    gate, step = threading.Event(), service.engine.step
    monkeypatch.setattr(service.engine, "step", lambda *a, **k: (gate.wait(30), step(*a, **k))[1])
    requests = [service.submit("Hello", max_new_tokens=2)]
    assert until(lambda: not service.n_waiting)
    requests += [service.submit("Hello", max_new_tokens=2) for _ in range(3)]
    try:
        with pytest.raises(ServerError, match=r"are waiting.*try again in about"):
            together.measure(Job(), prompt="Hello", n_tokens=4)
    finally:
        gate.set()
    assert all(request.sequence.ended.wait(30) for request in requests)


def test_without_an_engine_it_says_how_to_start_one(monkeypatch):
    monkeypatch.delenv(ENGINE_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=r"labkit serve.*--engine"):
        together.measure(Job(), prompt="Hello", n_tokens=4)


def test_an_answer_is_shown_as_text():
    assert "<b>" not in together.answer_html("<b>bold</b>")
