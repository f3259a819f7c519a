"""What the panels' tests share."""

from __future__ import annotations

import pytest

from labkit.perf import hardware
from labkit.perf.machine import sheet


@pytest.fixture
def known_machine(monkeypatch):
    """A data sheet's ceilings: nothing is measured, and nothing kept in the user's folder."""
    monkeypatch.setattr(hardware, "machine", lambda *_, **__: sheet("T4"))
