"""Somebody looks at every run under way, and what goes wrong while looking reaches whoever waits."""

from __future__ import annotations

import time

import numpy as np
import pytest

from labkit.kernels.cpu.cancellation import EVERY_S, cancellable


def wait_for(condition, seconds=5.0):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(EVERY_S / 4)
    return condition()


def test_each_of_several_runs_is_looked_at():
    stop, cells = {"a": False, "b": False}, np.zeros(2, np.int64)
    with cancellable(lambda: stop["a"], cells, 0), cancellable(lambda: stop["b"], cells, 1):
        stop["b"] = True
        assert wait_for(lambda: cells[1] == 1)
        assert cells[0] == 0
        stop["a"] = True
        assert wait_for(lambda: cells[0] == 1)


def test_a_run_that_is_over_is_left_alone():
    looks, cells = [], np.zeros(1, np.int64)
    with cancellable(lambda: bool(looks.append(1)), cells, 0):
        assert wait_for(lambda: looks)
    seen = len(looks)
    with cancellable(lambda: False, np.zeros(1, np.int64), 0):
        time.sleep(4 * EVERY_S)
    assert len(looks) == seen


def test_an_error_while_looking_is_raised_and_the_next_run_is_looked_at():
    def broken():
        raise LookupError("the stop button is gone")

    cells = np.zeros(1, np.int64)
    with pytest.raises(LookupError), cancellable(broken, cells, 0):
        assert wait_for(lambda: cells[0] == 1), "the run ends early"
    cells[0] = 0
    with cancellable(lambda: True, cells, 0):
        assert wait_for(lambda: cells[0] == 1)
