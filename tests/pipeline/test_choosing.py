"""A step that chooses the next token itself, as one on a GPU does, in the pipeline's loop."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

import labkit
from labkit import backends
from labkit.pipeline import Pipeline


class ChoosingStep(backends.ReferenceStep):
    """``asked`` holds whether more was to come."""

    asked: ClassVar[list[bool]] = []

    def choose_next(self, token_id, *, more, timer, should_stop):
        self.asked.append(more)
        logits = self(torch.tensor([token_id]), timer=timer, should_stop=should_stop)
        return lambda: int(logits.argmax())


@pytest.mark.parametrize(
    ("sampling", "chooses"),
    [(None, True), (labkit.Sampling(temperature=0.5), False), (labkit.Sampling(repetition_penalty=1.2), False)],
)
def test_a_step_may_choose_the_token_where_it_is_the_largest(model, monkeypatch, sampling, chooses):
    want = Pipeline(model, backend="reference", sampling=sampling).generate("Hello", max_new_tokens=6, ignore_eos=True)
    monkeypatch.setattr(ChoosingStep, "asked", [])
    monkeypatch.setattr(backends, "bind", lambda choice, **of: (choice, ChoosingStep(of["transformer"], of["cache"])))
    got = Pipeline(model, sampling=sampling).generate("Hello", max_new_tokens=6, ignore_eos=True)
    assert got.token_ids == want.token_ids
    assert [step.n_tokens for step in got.trace.steps] == [5, 1, 1, 1, 1, 1]
    assert ChoosingStep.asked == ([True, True, True, True, False] if chooses else [])


def test_a_step_that_can_not_choose_says_why(model, monkeypatch):
    monkeypatch.setattr(ChoosingStep, "choose_next", lambda step, token_id, **options: lambda: -1)
    monkeypatch.setattr(backends, "bind", lambda choice, **of: (choice, ChoosingStep(of["transformer"], of["cache"])))
    with pytest.raises(ValueError, match="not finite"):
        Pipeline(model).generate("Hello", max_new_tokens=6, ignore_eos=True)
