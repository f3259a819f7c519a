"""This machine's ceilings, measured: how fast it reads, copies and multiplies, and what one operation costs.

    machine()                   # measured once (under 20 s), then kept in the user's cache folder with its date
    machine(refresh=True)       # measure again: after a reboot, on another power plan, when it was busy

Every quantity is measured in several rounds that take turns, so a disturbance hits all of them and shows as
spread instead of bending one.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from labkit.perf.busy import BusyWatch, busy_now
from labkit.perf.device import caches, device_name, level_of, memory_bytes
from labkit.perf.machine import BUSY_SHARE, Machine, Rate
from labkit.resources import cache_folder

Progress = Callable[[float, str], None]

N_ROUNDS = 7
BUFFER_BYTES = {"cpu": 128 * 2**20, "cuda": 2 * 2**30}
"""Streamed buffer: several times most last-level caches, small enough for a 2 GB machine, and of one size whatever a
host says of its caches (``Machine.read_level``)."""
SLICE_S = 0.04
"""Time that one sample may take."""


def machine(device: str = "auto", *, refresh: bool = False, progress: Progress | None = None) -> Machine:
    """The ceilings of ``device`` ("auto": the GPU if there is one, else the CPU), measured here, once.

    ``progress(share, what)`` is called as it goes. Raises ValueError when the device is not there,
    RuntimeError when it stops answering while it is measured.
    """
    device = _present(device)
    path = _cache_path(device)
    if not refresh and path.is_file():
        try:
            kept = Machine.from_json(path.read_text(encoding="utf-8"))
            if kept.busy_share <= BUSY_SHARE or busy_now() > BUSY_SHARE:
                return kept  # else it was measured in a storm that is over: measure again
        except (OSError, ValueError):
            pass  # an older labkit's, or damaged: measure again
    found = measure(device, progress=progress)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found.to_json(), encoding="utf-8")
    except OSError:
        pass  # a read-only home: measured each session
    return found


def is_measured(device: str = "auto") -> bool:
    """Whether ``machine(device)`` would answer at once."""
    return _cache_path(_present(device)).is_file()


def measure(device: str = "cpu", *, progress: Progress | None = None) -> Machine:
    """Measure now, without the cache. Takes 5 to 15 seconds."""
    device = _present(device)
    say = progress or (lambda share, what: None)
    try:
        with BusyWatch() as watch, torch.inference_mode():
            rates = _rounds(_probes(device), say)
    except RuntimeError as error:
        raise RuntimeError(
            f"the device {device!r} stopped answering while it was measured ({error}). Restart the kernel; "
            "device='cpu' works without it, and labkit.perf.machine.sheet(name) forecasts from a data sheet."
        ) from error
    say(1.0, "done")
    return Machine(
        name=device_name(device),
        device=device,
        n_threads=torch.get_num_threads() if device == "cpu" else 1,
        memory_bytes=memory_bytes(device),
        read=max(rates["read"], rates.get("read, one thread", rates["read"]), key=lambda rate: rate.value),
        copy=max(rates["copy"], rates.get("copy, one thread", rates["copy"]), key=lambda rate: rate.value),
        matmul={name[7:]: rate for name, rate in rates.items() if name.startswith("matmul ")},
        dispatch_s=rates["dispatch"],
        read_one_thread=rates.get("read, one thread"),
        copy_one_thread=rates.get("copy, one thread"),
        caches=caches(device),
        read_level=level_of(BUFFER_BYTES[device], device),
        measured_at=datetime.now().isoformat(timespec="seconds"),
        busy_share=watch.share,
        torch_version=torch.__version__,
    )


def _rounds(probes: dict[str, Callable[[], float]], say: Progress) -> dict[str, Rate]:
    """Each probe once a round, in turn; the first round warms up and is dropped."""
    samples: dict[str, list[float]] = {name: [] for name in probes}
    total = len(probes) * (N_ROUNDS + 1)
    for idx in range(N_ROUNDS + 1):
        for at, (name, probe) in enumerate(probes.items()):
            say((idx * len(probes) + at) / total, f"measuring {name}")
            sample = probe()
            if idx:
                samples[name].append(sample)
    return {name: Rate.of(values) if name == "dispatch" else Rate.ceiling(values) for name, values in samples.items()}


def _probes(device: str) -> dict[str, Callable[[], float]]:
    """name -> one sample: bytes/s, FLOP/s, or seconds for dispatch."""
    source = torch.ones(BUFFER_BYTES[device] // 4, device=device)
    target = torch.empty_like(source)
    matrix = source.view(-1, 4096)
    vector = torch.ones(4096, device=device)
    tiny = torch.ones(8, device=device)
    sync = torch.cuda.synchronize if device == "cuda" else _nothing

    def best_of(*works: Callable[[], Any]) -> float:
        return min(_seconds(work, sync) for work in works)

    # Two ways to read everything once; the better of them is nearer to what the memory can do.
    def read() -> float:
        return source.nbytes / best_of(lambda: matrix.mv(vector), source.sum)

    def copy() -> float:
        return 2 * source.nbytes / best_of(lambda: target.copy_(source))

    def dispatch() -> float:
        n_ops = 300
        return _seconds(lambda: [torch.add(tiny, tiny) for _ in range(n_ops)], sync) / n_ops

    probes: dict[str, Callable[[], float]] = {"read": read, "copy": copy}
    if device == "cpu" and torch.get_num_threads() > 1:
        probes["read, one thread"] = _on_one_thread(read)
        probes["copy, one thread"] = _on_one_thread(copy)
    for name in ("fp32", "bf16", "fp16", "int8"):
        product = _matmul_probe(name, device, sync)
        if product is not None:
            probes[f"matmul {name}"] = product
    probes["dispatch"] = dispatch
    return probes


def _matmul_probe(name: str, device: str, sync: Callable[[], None]) -> Callable[[], float] | None:
    """FLOP/s of a square product, as large as a time slice allows; None where torch has no such product.

    On a CPU the better of all threads and one: threads that wait for each other on a busy machine are no ceiling.
    """
    n, largest = 256, 1024 if device == "cpu" else 8192
    try:
        while True:
            work = _product(name, n, device)
            work()
            if n >= largest or min(_seconds(work, sync) for _ in range(3)) * 8 > 2 * SLICE_S:
                break
            n *= 2
    except (RuntimeError, NotImplementedError, AttributeError):
        return None

    def sample() -> float:
        took = _seconds(work, sync)
        if device == "cpu" and torch.get_num_threads() > 1:
            with threads(1):
                took = min(took, _seconds(work, sync))
        return 2 * n**3 / took

    return sample


def _product(name: str, n: int, device: str) -> Callable[[], Any]:
    if name == "int8":
        a = torch.ones((n, n), dtype=torch.int8, device=device)
        b = torch.ones((n, n), dtype=torch.int8, device=device).t()
        return lambda: torch._int_mm(a, b)  # pyright: ignore[reportPrivateImportUsage]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    a = torch.full((n, n), 0.5, dtype=dtype, device=device)
    return lambda: torch.nn.functional.linear(a, a)


def _seconds(work: Callable[[], Any], sync: Callable[[], None]) -> float:
    sync()
    start = time.perf_counter()
    work()
    sync()
    return time.perf_counter() - start


def _nothing() -> None:
    pass


def _on_one_thread(probe: Callable[[], float]) -> Callable[[], float]:
    def sample() -> float:
        with threads(1):
            return probe()

    return sample


@contextmanager
def threads(n: int) -> Any:
    """Run the block on ``n`` of torch's CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _present(device: str) -> str:
    """ "cpu" or "cuda", checked. MPS is reached through its data sheet only."""
    kind = str(device).split(":")[0]
    if kind == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device='cuda': PyTorch sees no CUDA device now. Use device='cpu', or a data sheet "
            "(labkit.perf.machine.sheet('H200')) for what a GPU would do."
        )
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"cannot measure device {device!r}: choose auto, cpu or cuda.")
    return kind


def _cache_path(device: str) -> Path:
    """One file for each processor, thread count and torch version: what moves a ceiling."""
    key = f"{device_name(device)}|{os.cpu_count()}|{torch.get_num_threads()}|{torch.__version__}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return cache_folder() / "hardware" / f"{device}-{digest}.json"
