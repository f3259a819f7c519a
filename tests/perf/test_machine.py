"""Ceilings: the data sheets by hand arithmetic, the measurement by its contract (never by its figures)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from labkit.perf import device, hardware, probe
from labkit.perf.busy import BusyWatch
from labkit.perf.machine import Machine, Rate, sheet, sheets


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The real measurement, on so little that it takes a moment."""
    monkeypatch.setattr(hardware, "N_ROUNDS", 2)
    monkeypatch.setattr(hardware, "BUFFER_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(hardware, "SLICE_S", 0.0)
    monkeypatch.setattr(hardware, "busy_now", lambda: 1.0)
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))


def test_every_sheet_has_a_source_and_both_ceilings() -> None:
    for machine in sheets().values():
        assert not machine.measured
        assert len(machine.source) > 20
        assert machine.read.value > 1e10
        assert machine.memory_bytes > 0
        for dtype in machine.matmul:
            assert machine.ridge(dtype) > 1


@pytest.mark.parametrize(("name", "ridge", "mfu_percent"), [("A100-80GB", 153, 0.65), ("H200", 206, 0.49)])
def test_ridges_and_the_mfu_ceiling_of_decode(name: str, ridge: float, mfu_percent: float) -> None:
    """facts: at batch 1 in fp16 (one FLOP a byte) the MFU cannot exceed 0.65 % on an A100, 0.49 % on an H200."""
    assert sheet(name).ridge("fp16") == pytest.approx(ridge, abs=0.5)
    assert 100 / sheet(name).ridge("fp16") == pytest.approx(mfu_percent, abs=0.005)


def test_an_unknown_sheet_lists_the_known() -> None:
    with pytest.raises(ValueError, match="H200"):
        sheet("H2000")


def test_an_unknown_dtype_lists_the_known() -> None:
    with pytest.raises(ValueError, match="fp16"):
        sheet("T4").peak_flops("bf16")


def test_rate_of_samples() -> None:
    rate = Rate.of([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (rate.value, rate.low, rate.high, rate.n) == (3.0, 1.4, 4.6, 5)
    assert rate.spread == pytest.approx(3.2 / 3)


def test_a_ceiling_is_the_best_that_was_seen() -> None:
    rate = Rate.ceiling([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (rate.value, rate.low, rate.high) == (5.0, 1.4, 5.0)
    assert rate.spread == pytest.approx(3.6 / 5)


def test_measuring_fills_every_field(quick: None) -> None:
    told: list[float] = []
    found = hardware.measure("cpu", progress=lambda share, what: told.append(share))
    assert found.measured
    assert found.n_threads == torch.get_num_threads()
    assert {"fp32", "bf16"} <= set(found.matmul)
    rates = [found.read, found.copy, found.dispatch_s, *found.matmul.values()]
    assert all(0 < rate.low <= rate.value <= rate.high for rate in rates)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert 0.0 <= found.busy_share <= 1.0
    assert found.name in found.describe()
    assert Machine.from_json(found.to_json()) == found


def test_threads_are_put_back(quick: None) -> None:
    before = torch.get_num_threads()
    hardware.measure("cpu")
    assert torch.get_num_threads() == before


def test_it_is_measured_once_and_again_on_request(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hardware.machine("cpu")
    monkeypatch.setattr(hardware, "measure", lambda device, progress=None: pytest.fail("measured again"))
    assert hardware.machine("cpu") == first
    other = Machine.from_json(first.to_json().replace(first.measured_at, "2001-01-01T00:00:00"))
    monkeypatch.setattr(hardware, "measure", lambda device, progress=None: other)
    assert hardware.machine("cpu", refresh=True) == other
    assert hardware.machine("cpu") == other


def test_what_was_measured_in_a_storm_is_measured_again_in_the_calm(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Machine(**{**vars(hardware.machine("cpu")), "busy_share": 0.9})
    monkeypatch.setattr(hardware, "measure", lambda device, progress=None: first)
    assert hardware.machine("cpu", refresh=True) == first
    calm = Machine(**{**vars(first), "busy_share": 0.0})
    monkeypatch.setattr(hardware, "measure", lambda device, progress=None: calm)
    assert hardware.machine("cpu") == first  # still busy: no better would come of it
    monkeypatch.setattr(hardware, "busy_now", lambda: 0.0)
    assert hardware.machine("cpu") == calm


def test_a_damaged_cache_is_measured_again(quick: None, tmp_path: Any) -> None:
    hardware.machine("cpu")
    (path,) = (tmp_path / "hardware").glob("cpu-*.json")
    path.write_text("{}")
    assert hardware.machine("cpu").measured
    with pytest.raises(ValueError, match="not a measured machine"):
        Machine.from_json("{}")


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="choose auto, cpu or cuda"):
        hardware.machine("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"sees no CUDA device.*data sheet"):
            hardware.machine("cuda")


def test_a_device_that_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> Any:
        raise RuntimeError("CUDA error: the launch timed out")

    monkeypatch.setattr(hardware, "_rounds", gone)
    with pytest.raises(RuntimeError, match=r"stopped answering.*Restart the kernel"):
        hardware.measure("cpu")


def test_a_busy_machine_says_so() -> None:
    calm = sheet("H200")
    busy = Machine(**{**vars(calm), "source": "measured", "measured_at": "2026-11-29", "busy_share": 0.6})
    shaky = Machine(**{**vars(calm), "source": "measured", "read": Rate(10.0, 5.0, 11.0)})
    assert not calm.busy
    assert busy.busy
    assert shaky.busy
    assert "others used 60% of the cores" in busy.describe()


def test_the_watch_sees_others_and_not_ourselves() -> None:
    with BusyWatch() as watch:
        total = sum(i * i for i in range(300_000))
    assert total
    assert 0.0 <= watch.share <= 1.0
    assert watch.seconds > 0


def test_a_hosts_cache_bounds_no_buffer_and_is_said(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine that reports 480 MB of third-level cache, of which it has a share."""
    claimed = {"L1d": 32 * 2**10, "L3": 480 * 2**20}
    monkeypatch.setattr(device, "caches", lambda name: claimed)
    assert device.level_of(2**30, "cpu") == "memory"
    found = hardware.measure("cpu")
    assert "480 MiB, read 1 MiB" in found.read_level
    assert "decoding may pass it" in found.describe()
    assert Machine.from_json(found.to_json()).read_level == found.read_level
    swept: list[int] = []
    monkeypatch.setattr(probe, "_sweeper", lambda name, n_bytes, alone: swept.append(n_bytes))
    nothing: Any = torch.nn.Module()
    probe.Bench(nothing, probe.Engine(device="cpu", backend="reference"), transformer=nothing)
    assert swept == [device.MAX_FLUSH_BYTES]
