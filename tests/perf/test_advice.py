"""Advice and diagnosis on made-up rates and runs: the ranking and the verdict are arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest

import labkit.quant  # noqa: F401 - registers the packed formats
from labkit.perf import advice, forecast
from labkit.perf.drafting import Outlook
from labkit.perf.machine import Machine, Rate, sheet
from labkit.perf.probe import Engine
from labkit.perf.rates import Rates
from labkit.perf.timer import StepRecord
from labkit.perf.trace import Trace
from tests.perf.test_cost import SMOLLM2
from tests.perf.test_forecast import MACHINE, made_up


@pytest.fixture
def rates_by_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """int8 halves the time of a weight, fused removes the overhead, bf16 is ten times slower, int4 does not run."""

    def rates(config: Any, engine: Engine, **_: Any) -> Rates:
        if engine.weights == "int4":
            raise RuntimeError("int4 does not run here: made up")
        by = {"int8": 0.5}.get(str(engine.weights), 1.0) * (10.0 if engine.dtype == "bf16" else 1.0)
        weight = {512: {1: Rate.exactly(0.5e-9 * by), 256: Rate.exactly(5e-9 * by)}}
        changed: dict[str, Any] = {"weight_s": weight}
        if engine.backend == "fused":
            changed["overhead_s"] = {}
        return made_up(**changed)

    monkeypatch.setattr("labkit.perf.rates.rates", rates)


def ask(**changed: Any) -> advice.Advice:
    counts = {"n_prompt_tokens": 64, "n_new_tokens": 64, "machine": MACHINE, **changed}
    return advice.what_would_help(SMOLLM2, Engine(), **counts)


def test_switches_are_ranked_by_the_goal(rates_by_engine: None) -> None:
    found = ask(goal="itl")
    gains = [switch.gains["itl"] for switch in found.switches]
    assert gains == sorted(gains, reverse=True)
    assert found.best is not None
    assert found.best.changes == {"weights": "int8", "backend": "fused"}
    assert found.best.reloads
    assert not found.best.lossless


def test_a_switch_that_hurts_says_so(rates_by_engine: None) -> None:
    by_label = {switch.label: switch for switch in ask().switches}
    assert by_label["dtype='bf16'"].gains["itl"] < 0.5
    assert by_label["kv_cache='none'"].gains["wall"] < 0.5
    assert by_label["backend='fused'"].lossless
    assert not by_label["kv_cache='int8'"].lossless


def test_a_drafter_is_forecast_from_its_rounds_on_this_text(rates_by_engine: None) -> None:
    """Hand count: one round of 3 guesses yields 4 tokens, another yields one; 1 weight costs 0.5 ns, 4 together cost
    by the logarithmic line through (1, 0.5) and (256, 5): 0.5 * 10 ** (ln 4 / ln 256) = 0.8891 ns."""
    found = ask(goal="itl", outlooks=[Outlook("prompt-lookup", [(3, 4), (3, 1)], 1e-6)])
    switch = next(s for s in found.switches if s.changes == {"drafter": "prompt-lookup"})
    decode = found.now.decode.phases
    more = 10 ** (math.log(4) / math.log(256)) - 1
    attention_weights = 30 * (576 * 576 * 2 + 576 * 192 * 2)
    products = decode["ffn"].forecast_s - decode["ffn"].overhead_s + decode["lm_head"].forecast_s
    check = found.now.itl.value + more * (products + attention_weights * 0.5e-9)
    assert switch.forecast.itl.value == pytest.approx((2 * check + 6e-6) / 5, rel=0.01)
    assert switch.lossless


def test_a_drafter_that_never_hits_is_as_it_is(rates_by_engine: None) -> None:
    found = ask(outlooks=[Outlook("prompt-lookup", [(3, 1)] * 20, 1e-6)])
    switch = next(s for s in found.switches if "drafter" in s.changes)
    assert switch.gains["itl"] == pytest.approx(1.0)
    assert switch not in (found.best,)


def test_unpacking_a_files_own_blocks_keeps_the_tokens_and_costs_memory(rates_by_engine: None) -> None:
    counts = {"n_prompt_tokens": 64, "n_new_tokens": 64, "machine": MACHINE}
    found = advice.what_would_help(SMOLLM2, Engine(weights="stored"), **counts)
    by_label = {switch.label: switch for switch in found.switches}
    assert by_label["weights='plain'"].lossless
    assert by_label["weights='plain'"].gains["memory"] < 0.5
    assert not by_label["weights='int8'"].lossless
    assert "weights='stored'" not in by_label


def test_memory_is_a_goal_of_its_own(rates_by_engine: None) -> None:
    found = ask(goal="memory")
    assert found.switches[0].forecast.memory.total_bytes < found.now.memory.total_bytes


def test_what_does_not_run_is_listed_with_its_reason(rates_by_engine: None) -> None:
    assert ask().unavailable["weights='int4'"] == "int4 does not run here: made up"


def test_every_row_says_whether_tokens_may_change(rates_by_engine: None) -> None:
    rows = ask().rows()
    assert rows[0]["switch"] == "as it is"
    assert {row["tokens"] for row in rows} == {"as now", "may change"}


def test_out_of_time_a_switch_is_estimated_and_says_so(rates_by_engine: None) -> None:
    """Nothing may be measured: every switch is there all the same, none is recommended, and the memory is exact."""
    found = ask(goal="itl", budget_s=-1.0)
    assert {switch.measured for switch in found.switches} == {False}
    assert found.best is None
    assert {row["from"] for row in found.rows()[1:]} == {"bytes and FLOPs only"}
    by_label = {switch.label: switch for switch in found.switches}
    whole = {switch.label: switch for switch in ask(goal="itl").switches}
    for label, switch in by_label.items():
        if label in whole:
            assert switch.forecast.memory == whole[label].forecast.memory
    assert by_label["weights='int8'"].gains["itl"] > 1.5, "a quarter of the bytes, and bytes bind it"


def test_an_unknown_goal() -> None:
    with pytest.raises(ValueError, match="wall, ttft, itl, memory"):
        ask(goal="speed")


def test_on_a_data_sheet_nothing_is_measured() -> None:
    found = advice.what_would_help(
        SMOLLM2, Engine(dtype="fp16", device="cuda"), n_prompt_tokens=64, machine=sheet("T4"), goal="memory"
    )
    assert found.now.from_sheet
    assert found.switches


# --- the diagnosis ------------------------------------------------------------------------------------------

META = {"weights_bytes": 538_060_032, "weights": "fp32", "dtype": "fp32", "kv_cache": "contiguous", "backend": "fused"}


def trace(ttft_s: float, itl_s: list[float], *, n_prompt_tokens: int = 64, **meta: Any) -> Trace:
    """A run with these times; attention takes a third, the FFN the rest."""
    token_s = [ttft_s]
    for gap in itl_s:
        token_s.append(token_s[-1] + gap)
    steps = [StepRecord("prefill", 0.0, ttft_s, n_prompt_tokens, {"attention": ttft_s / 3, "ffn": 2 * ttft_s / 3})]
    for start, gap in zip(token_s, itl_s, strict=False):
        steps.append(StepRecord("decode", start, start + gap, 1, {"attention": gap / 3, "ffn": 2 * gap / 3}))
    return Trace(tuple(steps), tuple(token_s), token_s[-1], n_prompt_tokens, {**META, **meta})


def test_a_stream_at_the_bandwidth_is_bound_by_memory() -> None:
    found = trace(0.2, [0.06] * 40).diagnose(machine=MACHINE)  # 538 MB in 60 ms of 10 GB/s
    assert (found.symptom, found.bound) == ("slow to stream", "memory")
    assert found.mbu == pytest.approx(0.897, abs=0.01)
    assert "int8" in found.remedies[0]
    assert "MBU 90%" in str(found)


def test_a_stream_far_below_both_ceilings_is_bound_by_overhead() -> None:
    found = trace(0.2, [0.5] * 40, backend="reference").diagnose(machine=MACHINE)
    assert found.bound == "overhead"
    assert "backend='fused'" in found.remedies[0]


def test_a_long_prompt_is_bound_by_arithmetic() -> None:
    found = trace(6.0, [0.06] * 4, n_prompt_tokens=2000).diagnose(machine=MACHINE)
    assert (found.symptom, found.stage, found.bound) == ("slow to start", "prefill", "compute")
    assert "shorter prompt" in found.remedies[0]


def test_no_cache_is_seen_at_once() -> None:
    found = trace(0.2, [0.1 + 0.01 * i for i in range(40)], kv_cache="none").diagnose(machine=MACHINE)
    assert "KV cache" in found.remedies[0]
    assert any("context is felt" in line for line in found.evidence)


def test_packed_weights_are_not_told_to_pack() -> None:
    found = trace(0.02, [0.016] * 40, weights="int8", weights_bytes=140_000_000).diagnose(machine=MACHINE)
    assert found.bound == "memory"
    assert "fewer bits" not in found.remedies[0]


def test_busy_ceilings_are_said_to_be_rough() -> None:
    busy = Machine(**{**vars(MACHINE), "busy_share": 0.7})
    assert any("busy machine" in line for line in trace(0.2, [0.06] * 8).diagnose(machine=busy).evidence)


def test_a_run_without_a_token() -> None:
    with pytest.raises(ValueError, match="made no token"):
        Trace((), (), 0.0).diagnose(machine=MACHINE)


def test_forecast_module_is_the_one_asked(rates_by_engine: None) -> None:
    """The advice's numbers are the forecast's own."""
    now = ask().now
    direct = forecast.forecast(SMOLLM2, Engine(), n_prompt_tokens=64, machine=MACHINE)
    assert now.itl == direct.itl
