"""The forecast's arithmetic on rates that are made up, so that every figure can be computed by hand."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

import labkit.quant  # noqa: F401 - registers the packed formats
from labkit import registry
from labkit.kvcache.contiguous import ContiguousCache
from labkit.perf import launches, memory, probe, rates
from labkit.perf.cost import decode_cost, prefill_cost
from labkit.perf.forecast import Forecast, forecast, prefill_chunks
from labkit.perf.machine import Machine, Rate, sheet
from labkit.perf.probe import Bench, Engine, Point, plan, shell_of, stand_in, widths
from labkit.perf.rates import Rates, _cost, _derive
from labkit.perf.step_time import step_seconds
from tests.perf.families import FAMILIES
from tests.perf.test_cost import LLAMA2_7B, SMOLLM2

MS = 1e-3
ENGINE = Engine()


def exactly(value: float) -> Rate:
    return Rate.exactly(value)


MACHINE = Machine("made up", "cpu", 2, 8 * 10**9, exactly(10e9), exactly(10e9), {"fp32": exactly(100e9)}, exactly(2e-6))


def made_up(**changed: Any) -> Rates:
    by = {
        "overhead_s": {"attention": exactly(100e-6), "ffn": exactly(20e-6), "norm": exactly(30e-6)},
        "sequence_s": exactly(50e-6),
        "weight_s": {512: {1: exactly(0.5e-9), 256: exactly(5e-9)}, 1024: {1: exactly(0.5e-9), 256: exactly(5e-9)}},
        "head_s": {512: exactly(0.6e-9)},
        "norm_s": exactly(1e-9),
        "rotary_s": exactly(2e-9),
        "score_flop_s": exactly(0.02e-9),
        "chunk_flop_s": exactly(0.03e-9),
        "kv_byte_s": exactly(0.2e-9),
        "kv_write_s": exactly(0.1e-9),
    }
    return Rates(**{**by, **changed})


def run(**changed: Any) -> Forecast:
    counts = {"n_prompt_tokens": 256, "n_new_tokens": 1, **changed}
    return forecast(SMOLLM2, ENGINE, machine=MACHINE, rates=made_up(), **counts)


def test_a_decode_step_by_hand() -> None:
    phases = run().decode.phases
    assert phases["ffn"].forecast_s == pytest.approx(30 * (20e-6 + 3 * 576 * 1536 * 0.5e-9))
    cached = 257 * 46_080  # bytes that one query reads: 257 tokens of 23,040 values... in float32
    four_thirds = 4 / 3  # three key heads on two threads take as long as four
    expected = 30 * (100e-6 + 2 * 576 * (576 + 192) * 0.5e-9) + cached * 0.2e-9 * four_thirds
    assert phases["attention"].forecast_s == pytest.approx(expected)
    assert phases["lm_head"].forecast_s == pytest.approx(49_152 * 576 * 0.6e-9)
    assert phases["ffn"].overhead_s == pytest.approx(30 * 20e-6)


def test_a_prefill_by_hand() -> None:
    phases = run().prefill.phases
    assert phases["ffn"].forecast_s == pytest.approx(30 * (20e-6 + 3 * 576 * 1536 * 5e-9))
    scores = 30 * 4 * 576 * (256 * 257 / 2) * 0.02e-9
    expected = 30 * (100e-6 + 2 * 576 * (576 + 192) * 5e-9) + scores + 256 * 30 * 576 * 2e-9
    assert phases["attention"].forecast_s == pytest.approx(expected)
    assert phases["norm"].forecast_s == pytest.approx(30 * 30e-6 + 60 * 256 * 576 * 1e-9)


def test_which_side_binds() -> None:
    found = run()
    assert found.prefill.bound == "compute"
    assert found.decode.bound == "memory"
    assert found.decode.phases["norm"].bound == "overhead"
    assert found.ridge == pytest.approx(10.0)
    assert found.decode.intensity < found.ridge < found.prefill.intensity


def test_mfu_and_mbu_are_shares_of_the_ceilings() -> None:
    found = run()
    flops = prefill_cost(SMOLLM2, 256).total.flops
    assert found.prefill.mfu == pytest.approx(flops / (found.ttft.value * 100e9))
    moved = decode_cost(SMOLLM2, 256).total.bytes
    assert found.decode.mbu == pytest.approx(moved / (found.itl.value * 10e9))


def test_the_floor_is_never_above_what_ideal_rates_give() -> None:
    found = run().decode
    assert found.floor_s == pytest.approx(decode_cost(SMOLLM2, 256).total.bytes / 10e9, rel=1e-3)


def test_the_interval_is_the_rates_spread_and_never_nothing() -> None:
    narrow = run().itl
    assert narrow.low == pytest.approx(0.75 * narrow.value)
    assert narrow.high == pytest.approx(1.25 * narrow.value)
    shaky = made_up(weight_s={512: {1: Rate(0.5e-9, 0.4e-9, 1.5e-9)}})
    wide = forecast(SMOLLM2, ENGINE, machine=MACHINE, rates=shaky, n_prompt_tokens=256, n_new_tokens=1).itl
    assert wide.high > 1.5 * wide.value
    assert wide.value in wide


def test_without_a_cache_a_step_costs_what_its_prefill_does() -> None:
    found = forecast(
        SMOLLM2, Engine(kv_cache="none"), machine=MACHINE, rates=made_up(), n_prompt_tokens=200, n_new_tokens=2
    )
    assert found.decode.phases["ffn"].forecast_s > 0.9 * found.prefill.phases["ffn"].forecast_s
    assert found.memory.kv_cache_bytes == 0


def test_a_batch_shares_the_weights_and_not_the_cache() -> None:
    one, eight = run(), run(n_sequences=8)
    assert eight.decode.phases["ffn"].bytes == one.decode.phases["ffn"].bytes
    assert eight.decode.intensity > 4 * one.decode.intensity
    assert eight.decode_tok_s == pytest.approx(8 / eight.itl.value)
    assert eight.memory.kv_cache_bytes == 8 * one.memory.kv_cache_bytes


def test_a_long_prompt_goes_in_chunks() -> None:
    assert prefill_chunks(2500, ENGINE) == [(0, 1024), (1024, 1024), (2048, 452)]
    assert prefill_chunks(2500, Engine(kv_cache="none")) == [(0, 2500)]
    from labkit import pipeline

    assert pipeline.PREFILL_CHUNK_TOKENS["cpu"] == memory.PREFILL_CHUNK_TOKENS


def test_a_data_sheet_needs_no_measurement() -> None:
    found = forecast(
        LLAMA2_7B,
        Engine(dtype="fp16", device="cuda"),
        n_prompt_tokens=512,
        machine=sheet("A100-80GB"),
    )
    assert found.from_sheet
    assert found.decode.mbu == pytest.approx(1.0, abs=0.01)
    assert found.decode.mfu == pytest.approx(0.0065, abs=0.0003)
    assert found.itl.value == pytest.approx(13.21e9 / 2039e9 + 0.5e9 * 0.544 / 2039e9, rel=0.03)


def test_launches_bind_a_small_model_on_a_large_gpu() -> None:
    found = forecast(SMOLLM2, Engine(dtype="bf16", device="cuda"), n_prompt_tokens=16, machine=sheet("H200"))
    assert found.decode.bound == "overhead"
    per_layer, outside = launches.launches(SMOLLM2)
    expected = (30 * per_layer + outside) * sheet("H200").dispatch_s.value
    assert found.itl.value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("counts", "said"),
    [({"n_prompt_tokens": 0}, "at least 1"), ({"n_prompt_tokens": 9000}, "exceed the model's context of 8192")],
)
def test_impossible_runs(counts: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(**counts)


# --- the rates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 3, 4])
def test_rates_are_recovered_from_times_made_with_them(group: int) -> None:
    """Times computed forward from known rates, on the stand-ins; solving the equations gives the rates back."""
    truth = made_up(
        overhead_s={name: exactly(50e-6) for name in ("attention", "ffn", "norm", "kv_cache", "embed", "lm_head")},
        weight_s={w: {n: exactly(1e-9 * (1 + n / 32)) for n in (1, 4, 16, 64, 256, 1024)} for w in (512, 1024)},
        head_s={512: exactly(0.6e-9), 1024: exactly(0.6e-9)},
        n_heads_together=stand_in(widths("cpu")["narrow"], group).n_kv_heads,
    )
    models = {"shell": shell_of(SMOLLM2), **{name: stand_in(w, group) for name, w in widths("cpu").items()}}
    samples = {}
    for point in plan("cpu"):
        step = _cost(models[point.model], point, ENGINE)
        seconds = step_seconds(models[point.model], ENGINE, MACHINE, truth, step, lambda r: r.value)
        phases = {name: total for name, (_, total) in seconds.items() if name not in ("sample", "schedule")}
        samples[point] = [{**phases, "step": sum(phases.values())}] * 3
    found = _derive(models, ENGINE, samples, 0.0)
    assert found.weight(700, 64).value == pytest.approx(3e-9, rel=0.05)
    assert found.head(600).value == pytest.approx(0.6e-9, rel=0.05)
    for name in ("score_flop_s", "chunk_flop_s", "kv_byte_s", "rotary_s", "norm_s", "sequence_s"):
        assert getattr(found, name).value == pytest.approx(getattr(truth, name).value, rel=0.15), name


def test_rates_survive_the_file() -> None:
    truth = made_up()
    assert Rates.from_json(truth.to_json()) == truth
    with pytest.raises(ValueError, match="not measured rates"):
        Rates.from_json("[]")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shell_runs_like_its_model(family: str) -> None:
    """The shell has the family's own operations: as many a layer as the model."""
    with torch.inference_mode():
        times = Bench(shell_of(FAMILIES[family]), ENGINE).sample(Point("shell", 1, 8))
    assert {"attention", "ffn", "norm", "kv_cache", "lm_head", "embed", "step"} <= set(times)


def _engines() -> list[Engine]:
    """Each registered component once, beside the plain ones."""
    here = {kind: [i.name for i in registry.components(kind) if not i.unavailable] for kind in KINDS}
    return [Engine(**{kind: name}) for kind in KINDS for name in here[kind] if name != "compiled"]


KINDS = ("backend", "weights", "kv_cache")


@pytest.mark.parametrize("engine", _engines(), ids=Engine.label)
def test_every_engine_of_the_registries_can_be_timed(engine: Engine) -> None:
    """Every kind of point that a plan has, in small."""
    bench = Bench(shell_of(SMOLLM2), engine, sweep_bytes=1 << 20)
    with torch.inference_mode():
        for point in (
            Point("shell", 1),
            Point("shell", 1, 70),
            Point("shell", 1, 8, 2),
            Point("shell", 5),
            Point("shell", 5, 9),
        ):
            assert bench.sample(point)["step"] > 0


def test_measuring_an_engine_end_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A real measurement on stand-ins of next to no size; read back from the cache the second time."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(probe, "N_REPEATS", 1)
    monkeypatch.setattr(rates, "busy_now", lambda: 1.0)
    monkeypatch.setattr(rates, "widths", lambda device: {"narrow": 256, "wide": 512})
    found = rates.rates(SMOLLM2, ENGINE)
    assert found.weight(576, 1).value > 0
    monkeypatch.setattr(rates, "measure", lambda *_, **__: pytest.fail("measured again"))
    assert rates.rates(SMOLLM2, ENGINE) == found
    itl = forecast(SMOLLM2, ENGINE, n_prompt_tokens=32, machine=MACHINE, rates=found).itl
    assert itl.low < itl.value < itl.high


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler here: the backend is not offered")
def test_the_compiled_backend_has_no_forecast_and_says_why() -> None:
    with pytest.raises(RuntimeError, match="compiled for half a minute: no forecast"):
        rates.measure(SMOLLM2, Engine(backend="compiled"))


def test_an_engine_that_does_not_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="does not run here: unknown backend 'nope'"):
        rates.measure(SMOLLM2, Engine(backend="nope"))


def test_a_bench_fills_the_cache_it_is_told_to() -> None:
    bench = Bench(shell_of(SMOLLM2), ENGINE)
    cache = bench._cache(Point("shell", 1, 20, 3))
    assert isinstance(cache, ContiguousCache)
    assert [cache.n_tokens(i) for i in range(3)] == [20, 20, 20]


def test_milliseconds_are_described() -> None:
    assert "ms (" in run().itl.describe()
    assert {row["stage"] for row in run().rows()} == {"prefill", "decode"}
