"""Fewer threads while others need the cores: when they are tried, when they stay, and that the tokens do not change."""

from __future__ import annotations

import pytest
import torch

from labkit.backends import fused_step as fused
from labkit.kernels.cpu import active_threads
from labkit.kernels.cpu.active_threads import ActiveThreads
from labkit.perf.timer import NULL_TIMER
from labkit.quant import Int4, Int8
from tests.kernels.compare import cache_for, quantize
from tests.kernels.families import long_config, random_model


class Machine:
    """A clock, a team whose step takes as long as the test says, and other programs' share of the cores."""

    def __init__(self, monkeypatch, n_threads=2):
        self.n_threads, self.now, self.share = n_threads, 100.0, 0.0
        self.seconds = {n: 0.04 for n in range(1, n_threads + 1)}
        self.asked = []
        monkeypatch.setattr(active_threads.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(active_threads, "BusyWatch", lambda: self)

    def __enter__(self):
        return self

    def so_far(self):
        return self.share, 1.0

    def run(self, job, n_threads=0):
        n = n_threads or self.n_threads
        self.asked.append(n)
        self.now += self.seconds[n]
        return self.seconds[n]

    def steps(self, chooser, n):
        self.asked.clear()
        for _ in range(n):
            chooser.run(self, None)
        return self.asked


def test_a_quiet_machine_is_left_alone(monkeypatch):
    machine, chooser = Machine(monkeypatch), ActiveThreads()
    assert set(machine.steps(chooser, 500)) == {2}
    assert chooser.note(2) == ""


def test_one_thread_less_stays_while_it_is_faster_and_others_are_busy(monkeypatch):
    machine, chooser = Machine(monkeypatch), ActiveThreads()
    machine.share, machine.seconds = 0.4, {1: 0.08, 2: 0.12}
    machine.steps(chooser, 100)
    asked = machine.steps(chooser, 200)
    assert asked.count(1) > 160  # the rest are looks at whether two have become faster again
    assert asked.count(2) >= active_threads.TRIAL_STEPS
    assert chooser.note(2).startswith("1 of 2 threads")
    machine.share, machine.seconds = 0.0, {1: 0.08, 2: 0.04}
    machine.steps(chooser, 20)
    assert set(machine.steps(chooser, 100)) == {2}


def test_one_thread_less_that_is_slower_does_not_stay(monkeypatch):
    machine, chooser = Machine(monkeypatch), ActiveThreads()
    machine.share, machine.seconds = 0.4, {1: 0.08, 2: 0.06}
    asked = machine.steps(chooser, 400)
    assert asked.count(1) < 80
    assert asked.count(1) >= active_threads.TRIAL_STEPS


def test_steps_that_are_longer_than_the_time_between_two_looks_choose_too(monkeypatch):
    machine, chooser = Machine(monkeypatch), ActiveThreads()
    machine.share, machine.seconds = 0.5, {1: 1.0, 2: 2.5}
    assert set(machine.steps(chooser, active_threads.TRIAL_STEPS)) == {2}
    machine.steps(chooser, 5)
    assert machine.steps(chooser, 10).count(1) > 6


def test_a_longer_step_is_not_a_slower_one(monkeypatch):
    """Without a KV cache each step has a token more than the one before."""
    machine, chooser = Machine(monkeypatch), ActiveThreads()
    machine.share = 0.5
    for n in range(5, 300):
        machine.seconds = {1: 0.012 * n, 2: 0.010 * n}
        chooser.run(machine, None, n_tokens=n)
    assert not chooser.n_active


def test_another_run_of_the_model_does_not_end_a_trial(monkeypatch):
    """Its step began before the trial did, with the number of threads from before."""
    machine, chooser = Machine(monkeypatch), ActiveThreads()
    machine.share = 0.4
    while not chooser._trial:
        chooser.run(machine, None)
    chooser._trial, waiting = 0, chooser._trial
    machine.run = lambda job, n_threads=0: setattr(chooser, "_trial", waiting) or 0.04
    chooser.run(machine, None)
    assert chooser._trial == waiting


def test_a_smaller_team_is_not_asked_for_more_threads_than_it_has(monkeypatch):
    chooser = ActiveThreads()
    chooser.n_active = 3
    assert Machine(monkeypatch).steps(chooser, 5) == [2] * 5


@pytest.mark.parametrize("weights", [None, Int8(), Int4(group_size=32)])
def test_the_logits_do_not_depend_on_how_many_threads_take_a_step(weights):
    """Bit for bit, numbers changing within a run: 300 tokens are several tiles of keys."""
    transformer = quantize(random_model(long_config(4, 2, d_head=16)), weights)
    ids, results = torch.arange(306) % 101, []
    with torch.inference_mode():
        for counts in ((3,) * 6, (1,) * 6, (2, 1, 3, 1, 3, 2)):
            step = fused.FusedStep(transformer, cache_for(transformer, capacity=400), 3)
            options = {"timer": NULL_TIMER, "should_stop": lambda: False}
            step(ids[:300], **options)
            logits = []
            for n, token in zip(counts, ids[300:], strict=True):
                step._active.n_active = n
                logits.append(step(token[None], **options))
            results.append(torch.cat(logits))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
