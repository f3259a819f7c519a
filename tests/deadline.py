"""A pytest plugin: a test that does not end is ended, says where it stood, and is not tried again.

Two limits. pytest-timeout's signal comes first: the test fails like any other, and the process goes on. Where Python's
main thread never sees a signal (a loop in machine code, a lock held in native code) the process itself ends ``GRACE_S``
later, after the stack of each thread has gone to standard error: only a timer outside Python still runs there.

When a worker process ends in the middle of a test, pytest-xdist's ``--dist loadscope`` hands the same test to the next
worker, over and over, or waits for ever (its issues 1327, 1371 and 1378). Here the run ends, and names the test.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from typing import Any

import pytest

GRACE_S = 60.0
ERRORS = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ERRORS] = os.dup(2)  # before a test's own output is captured


def pytest_unconfigure(config: pytest.Config) -> None:
    faulthandler.cancel_dump_traceback_later()
    os.close(config.stash[ERRORS])


def limit_s(item: pytest.Item) -> float:
    """How long a test may take: its own mark, or the project's limit; 0 for no limit."""
    marker = item.get_closest_marker("timeout")
    if marker is not None and marker.args:
        return float(marker.args[0])
    return float(item.config.getoption("timeout") or item.config.getini("timeout") or 0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    errors, limit = item.config.stash[ERRORS], limit_s(item)
    if limit:
        faulthandler.dump_traceback_later(limit + GRACE_S, exit=True, file=errors)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    sched.config.pluginmanager.getplugin("dsession").shouldstop = f"{crashitem} ended its worker process"
