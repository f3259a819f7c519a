"""Lesson 11's panels on a tiny model: what they draw is what was served."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from labkit.pipeline import Pipeline
from labkit.ui.panels import batching, paging
from tests.serving.conftest import _one_thread, _reading, model  # noqa: F401 - fixtures


class Job:
    def __init__(self) -> None:
        self.shown = []

    def progress(self, *_):
        pass

    def show(self, result):
        self.shown.append(result)


@pytest.fixture
def lab(model):  # noqa: F811
    return SimpleNamespace(model=model, pipeline=lambda: Pipeline(model, backend="reference"))


def test_both_policies_serve_the_same(lab):
    run = batching.measure(lab, Job(), n_requests=8, longest=12, together=4, turns=1)
    ids = run.data["token_ids"]
    assert [len(tokens) for tokens in ids["static"]] == batching.lengths(8, 12) == [12, 2, 2, 2] * 2
    assert ids["static"] == ids["continuous"]
    assert run.data["ratio"] > 0
    assert {row["policy"] for row in run.rows} == {"static", "continuous"}
    drawn = [bar for bar in run.figure.data if bar.name == "decode"]
    assert len(drawn) == 2
    assert {int(y) for y in drawn[0].y} == set(range(1, 9))
    assert "same 12 tokens" in batching.same_alone(lab, run.data)


def test_a_request_that_has_nothing_yet_is_drawn_as_waiting(lab):
    service = batching.Service(lab.model, start=False)
    request = service.submit("Hello", max_new_tokens=2)
    rows = batching._so_far([request], request.arrived_s + 2.0)
    assert [(row["kind"], pytest.approx(2.0)) for row in rows] == [("queue", row["end_s"]) for row in rows]
    assert len(rows) == 1


def test_the_grid_names_who_shares(lab):
    text = paging.grid_html([[4, 7], [4], [], [7]], "Two")
    assert "1 blocks that both refer to, 2 of one request alone, 1 free" in text
    assert [name in text for name in (">AB<", ">A<", ">B<", ">·<")] == [True] * 4


def test_what_a_chunked_prompt_bought_is_said_either_way():
    def rows(whole, *chunked):
        return [
            {"policy": name, "writer's longest gap, ms": gap, "the newcomer's TTFT, ms": ttft}
            for name, gap, ttft in zip("ABC", (whole, *chunked), (100.0, 200.0, 350.0), strict=False)
        ]

    best = paging.stalled(rows(200.0, 90.0, 40.0))
    assert [words in best for words in ("**C**", "40 ms instead of 200 ms", "3.5 times")] == [True] * 3
    assert "40 ms instead of 200 ms" in paging.stalled(rows(200.0, 40.0))
    assert "2.0 times" in paging.stalled(rows(200.0, 40.0))
    assert "did not shorten" in paging.stalled(rows(100.0, 99.0))
