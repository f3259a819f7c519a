"""The switchboard's forecast and the roofline, driven by clicks, on rates that are made up (nothing is timed)."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.perf import hardware
from labkit.perf import rates as rates_module
from labkit.perf.forecast import forecast
from labkit.perf.machine import Rate
from labkit.perf.probe import Engine
from labkit.ui.panels import article_claims, roofline
from labkit.ui.panels import forecast as panel
from labkit.ui.panels.switchboard import Switchboard
from labkit.ui.session import shelf
from tests.perf.test_forecast import MACHINE, made_up


@pytest.fixture
def made_up_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "is_measured", lambda device="auto": True)
    monkeypatch.setattr(hardware, "machine", lambda *_, **__: MACHINE)
    monkeypatch.setattr(rates_module, "is_measured", lambda *_: True)
    monkeypatch.setattr(rates_module, "rates", lambda *_, **__: made_up())


@pytest.fixture
def board(default_model: Any, made_up_machine: None) -> Any:
    shelf.put(default_model)
    made = Switchboard(prompt="one_word", max_new_tokens=4, extras=[panel.AdviceCard()])
    yield made
    made.stop()
    shelf.clear()


def run(board: Any) -> Any:
    board.run_button.click()
    return board.wait(120)


def test_a_run_stands_beside_its_forecast(board: Any, default_model: Any) -> None:
    completion = run(board)
    extra = board.extras[0]
    expected = forecast(
        default_model.config,
        Engine(extra.forecast.engine.backend),
        n_prompt_tokens=completion.trace.n_prompt_tokens,
        n_new_tokens=4,
        machine=MACHINE,
        rates=made_up(),
    )
    assert extra.forecast.itl == expected.itl
    assert "slow to" in extra.diagnosis.value.lower()
    for word in ("ceiling, ms", "forecast, ms", "measured, ms", "lm head", "bound by"):
        assert word in extra.table.value


def test_advice_is_ranked_and_the_best_is_run(board: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run(board)
    extra = board.extras[0]

    def rates(config: Any, engine: Engine, **_: Any) -> Any:
        faster = engine.kv_cache == "paged"  # made up: only the arithmetic is under test
        return made_up(weight_s={512: {1: Rate.exactly(0.05e-9)}}) if faster else made_up()

    monkeypatch.setattr(rates_module, "rates", rates)
    extra.advise_button.click()
    advice = extra.wait()
    assert advice.switches[0].gains["wall"] >= advice.switches[-1].gains["wall"]
    assert "as it is" in extra.ranking.value
    assert advice.best is not None
    extra.best_button.click()
    again = board.wait(120)
    assert again.trace.meta["kv_cache"] == advice.best.changes["kv_cache"]
    assert "side by side" in extra.side_by_side.value


def test_before_the_first_run_there_is_nothing_to_forecast(made_up_machine: None) -> None:
    with pytest.raises(ValueError, match="press Run first"):
        panel.AdviceCard().advise()


def test_an_engine_that_was_not_measured_is_not_forecast(board: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates_module, "is_measured", lambda *_: False)
    run(board)
    assert board.extras[0].forecast is None
    assert "an engine is measured" in board.extras[0].status.text
    board.extras[0].phases_button.click()
    board.extras[0].wait()
    assert "forecast, ms" in board.extras[0].table.value


def test_dots_are_counted_and_measured(default_model: Any, made_up_machine: None) -> None:
    shelf.put(default_model)
    lab = labkit_setup()
    found = roofline.panel(lab)
    found.fields["up_to"].value = 4
    found.run_button.click()
    result = found.wait()
    assert result is not None
    dots = result.data["dots"]
    assert [d["tokens together"] for d in dots] == [1, 2, 4]
    assert dots[2]["FLOP/byte"] > 3 * dots[0]["FLOP/byte"]  # not 4: the head serves the last token alone
    found.fields["grows"].value = roofline.BATCH
    found.run_button.click()
    assert found.wait().data["dots"][2]["FLOP/byte"] > 3 * dots[0]["FLOP/byte"]
    shelf.clear()


def labkit_setup() -> Any:
    from labkit.ui import lesson

    return lesson.setup()


def test_the_articles_claims_are_recomputed() -> None:
    rows = {row["claim"]: row["recomputed"] for row in article_claims.claims(article_claims.LLAMA_7B)}
    joined = " ".join(rows.values())
    for figure in ("150x", "819,200 B = 800 KiB", "26.95 / 13.48", "0.65 % (A100), 0.49 % (H200)"):
        assert figure in joined
    assert article_claims.batch_for_mfu("A100-80GB", 0.3) == pytest.approx(46, abs=0.5)
    assert article_claims.batch_for_mfu("H200", 0.3) == pytest.approx(62, abs=0.5)


def test_tokens_that_share_a_weight_at_the_ridge(default_model: Any) -> None:
    """Each weight of 4 bytes serves 2 FLOPs a token: at 10 FLOP a byte that is 20 tokens."""
    assert roofline.tokens_at_ridge(MACHINE, default_model) == pytest.approx(20)


def test_a_dot_above_a_ceiling_measured_too_low_stays_in_view() -> None:
    peak = MACHINE.peak_flops("fp32") / 1e9
    low, high = roofline.roofline_figure(MACHINE, "fp32", highest=30 * peak).layout.yaxis.range
    assert 10**low < peak < 30 * peak < 10**high
