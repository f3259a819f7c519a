"""The forecast beside the measurement, from a data sheet's machine so that nothing is measured here."""

from __future__ import annotations

import pytest

from labkit.perf import hardware, machine
from labkit.ui.panels.forecast_card import ForecastCard
from labkit.ui.panels.switchboard import Switchboard
from labkit.ui.session import shelf


@pytest.fixture
def board(default_model, monkeypatch):
    sheet = machine.sheet(next(iter(machine.sheets())))
    monkeypatch.setattr(hardware, "machine", lambda device, progress=None: sheet)
    shelf.put(default_model)
    yield Switchboard(prompt="one_word", max_new_tokens=3, extras=[ForecastCard()])
    shelf.clear()


def test_guess_floor_forecast_and_measurement_stand_together(board):
    card = board.extras[0]
    assert card.button.disabled, "nothing to compare yet"
    board.run_button.click()
    completion = board.wait(120)
    card.guess.value = "20"
    card.button.click()
    found = card.wait(60)
    assert found.n_prompt_tokens == completion.trace.n_prompt_tokens
    rows = {row[""]: row for row in card.rows(found, completion)}
    assert rows["time per token"]["your guess"] == "50.0 ms"
    assert rows["tok/s"]["your guess"] == "20.0"
    assert found.decode.floor_s > 0
    assert "Predicted and measured" in card.out.value


def test_a_guess_that_is_no_number_is_told(board):
    card = board.extras[0]
    board.run_button.click()
    board.wait(120)
    card.guess.value = "fast"
    card.button.click()
    assert "not a number" in card.error.value
    assert not card.runner.running
