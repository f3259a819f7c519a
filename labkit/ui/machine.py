"""What the lab runs on, in words a reader knows: found here, at the moment of asking."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from labkit.ui.words import counted, say


@dataclass(frozen=True)
class Machine:
    cpu: str
    n_cores: int
    memory_bytes: int
    gpu: str | None
    gpu_bytes: int

    @property
    def facts(self) -> list[str]:
        """Short phrases for a row of tags."""
        facts = [
            self.cpu,
            counted(self.n_cores, "{n} core", "{n} cores"),
            f"{self.memory_bytes / 1e9:.0f} GB",
        ]
        facts.append(f"{self.gpu}, {self.gpu_bytes / 1e9:.0f} GB" if self.gpu else say("no GPU: the CPU does the work"))
        return facts


@cache
def this_machine() -> Machine:
    import psutil
    import torch

    gpu, gpu_bytes = None, 0
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu, gpu_bytes = properties.name, properties.total_memory
    return Machine(_cpu_name(), _n_cores(), _memory_bytes(psutil.virtual_memory().total), gpu, gpu_bytes)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].replace("(R)", "").replace("(TM)", "").replace(" CPU", "")
                return " ".join(name.split("@")[0].split())
    except OSError:
        pass
    return platform.processor() or platform.machine() or say("an unnamed CPU")


def _n_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes(installed: int) -> int:
    """The container's limit where there is one: what Binder and Docker allow, not what the host has."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            return min(installed, int(text))
    return installed
