"""A pytest plugin for ``make notebooks``: how much memory each notebook's kernel needed, and an error above the limit.

Binder ends a kernel at 2 GB. The peak is the kernel's own high-water mark, which Linux keeps (elsewhere: no check).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nbval.plugin import IPyNbFile

MAX_BYTES = 1_500_000_000
PROPERTY = "kernel_peak_bytes"


def peak_bytes(pid: int) -> int | None:
    """The most memory that process ``pid`` has had resident, or None where the system does not say."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return None
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    return int(lines["VmHWM"].split()[0]) * 1024


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After a notebook's last cell, while its kernel still lives."""
    book = item.parent
    is_last = isinstance(book, IPyNbFile) and (nextitem is None or nextitem.parent is not book)
    peak = None
    if is_last and book.kernel is not None and book.kernel.is_alive():
        peak = peak_bytes(book.kernel.km.provisioner.pid)
    if peak is not None:
        item.user_properties.append((PROPERTY, peak))
    yield
    if peak is not None and peak > MAX_BYTES:
        pytest.fail(
            f"{book.name}: its kernel needed {peak / 1e9:.2f} GB; at most {MAX_BYTES / 1e9} GB are allowed",
            pytrace=False,
        )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The peaks, largest first."""
    peaks = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "teardown":
                peaks.update({report.nodeid.split("::")[0]: v for k, v in report.user_properties if k == PROPERTY})
    if peaks:
        terminalreporter.section("memory of the notebooks' kernels")
        for name, peak in sorted(peaks.items(), key=lambda pair: -pair[1]):
            terminalreporter.write_line(f"{peak / 1e6:7.0f} MB  {name}")
