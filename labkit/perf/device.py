"""What a device is called, how much it holds, and how large its caches are: read from the system, not measured."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import psutil
import torch


def device_name(device: str) -> str:
    """What the maker calls it: "AMD EPYC 7763 64-Core Processor", "NVIDIA H200"."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(encoding="utf-8", errors="replace"), re.M)
        if match:
            return match.group(1).strip()
    return platform.processor() or platform.machine()


def memory_bytes(device: str) -> int:
    """All of the device's memory; a container's limit counts as the machine's."""
    if device == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    total = psutil.virtual_memory().total
    return min([total, *_cgroup_limits()])


def free_bytes(device: str) -> int:
    """Memory that can still be taken on the device."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    free = psutil.virtual_memory().available
    own = psutil.Process().memory_info().rss
    return max(0, min([free, *(limit - own for limit in _cgroup_limits())]))


def _cgroup_limits() -> list[int]:
    limits = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return limits


def caches(device: str) -> dict[str, int]:
    """Cache sizes by level, where the system tells; one instance of each."""
    if device == "cuda":
        size = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 0)
        return {"L2": size} if size else {}
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind = (index / "type").read_text().strip()
            level = (index / "level").read_text().strip()
            size = (index / "size").read_text().strip()
        except OSError:
            continue
        if kind != "Instruction" and size.endswith("K"):
            found[f"L{level}d" if level == "1" else f"L{level}"] = int(size[:-1]) * 1024
    return found


def cache_bytes(device: str) -> int:
    """The largest cache of the device, 32 MiB where the system does not tell."""
    return max(caches(device).values(), default=32 * 2**20)


MAX_FLUSH_BYTES = 256 * 2**20
"""A virtual machine reports its host's third level (480 MB have been seen), of which it has a share: twice that would
be most of a small machine's memory."""


def flush_bytes(device: str) -> int:
    """How much is read to empty the caches: twice the largest, within bounds."""
    return min(max(64 * 2**20, 2 * cache_bytes(device)), MAX_FLUSH_BYTES)


def level_of(n_bytes: int, device: str) -> str:
    """Where a buffer of that size is read from, again and again: "memory", or that a cache may hold it.

    A virtual machine reports its host's cache, however small its share of it is: labkit makes no buffer as large as
    that, and says instead what the figure may be.
    """
    largest = cache_bytes(device)
    if n_bytes >= 2 * largest:
        return "memory"
    return f"memory or a cache (the system reports one of {largest / 2**20:.0f} MiB, read {n_bytes / 2**20:.0f} MiB)"
