"""The GPU's timer on a device that the test plays: events that pass when it says so."""

from __future__ import annotations

import pytest

from labkit.perf.cuda_timer import CudaTimer


class Device:
    """Its clock, in ms; an event is stamped when the device reaches it."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.queue: list[Event] = []
        self.busy_ms: list[tuple[Event, float]] = []
        self.n_events = 0
        self.pending_ms = 0.0

    def work(self, ms: float) -> None:
        """Queue work of this length; the host goes on at once."""
        self.pending_ms += ms

    def catch_up(self) -> None:
        for event in self.queue:
            self.now_ms += event.before_ms
            event.at_ms = self.now_ms
        self.queue.clear()


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at_ms, self.before_ms = device, None, 0.0
        device.n_events += 1

    def record(self, stream: object) -> None:
        self.before_ms, self.device.pending_ms = self.device.pending_ms, 0.0
        self.at_ms = None
        self.device.queue.append(self)

    def query(self) -> bool:
        return self.at_ms is not None

    def synchronize(self) -> None:
        self.device.catch_up()

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


@pytest.fixture
def device(monkeypatch) -> Device:
    import torch

    made = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(made))
    return made


def run(device: Device, timer: CudaTimer, n_steps: int, *, catch_up: bool) -> None:
    timer.begin()
    for n in range(n_steps):
        timer.begin_step("prefill" if n == 0 else "decode", 1)
        with timer("attention"):
            device.work(2)
            with timer("kv_cache"):
                device.work(1)
        with timer("ffn"):
            device.work(4)
        if catch_up:
            device.catch_up()
    timer.end_step()


def test_phases_are_the_devices_time_and_exclusive(device):
    timer = CudaTimer()
    run(device, timer, 3, catch_up=False)
    assert all(not step.phases for step in timer.records()), "nothing has passed yet"
    timer.finish()
    for step in timer.records():
        assert step.phases == pytest.approx({"attention": 2e-3, "kv_cache": 1e-3, "ffn": 4e-3})
    assert [step.stage for step in timer.records()] == ["prefill", "decode", "decode"]


def test_a_step_shows_as_soon_as_the_device_has_passed_it(device):
    timer = CudaTimer()
    run(device, timer, 3, catch_up=True)
    assert timer.records()[0].phases == pytest.approx({"attention": 2e-3, "kv_cache": 1e-3, "ffn": 4e-3})
    assert timer.records()[2].phases == {}


def test_events_are_used_again(device):
    timer = CudaTimer()
    run(device, timer, 50, catch_up=True)
    assert device.n_events < 40, "a long run must not hold an event for every switch it ever made"


def test_a_kernel_that_timed_itself_can_re_attribute(device):
    timer = CudaTimer()
    timer.begin()
    timer.begin_step("decode", 1)
    with timer("attention"):
        device.work(10)
        timer.charge({"ffn": 4e-3})
    timer.end_step()
    timer.finish()
    assert timer.records()[0].phases == pytest.approx({"attention": 6e-3, "ffn": 4e-3})
