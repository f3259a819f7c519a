"""What works on this machine, what does not, and what to do about it.

Each check is a function that returns one finding; one that raises becomes a finding itself, so a broken machine
gets a report and never a traceback.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from labkit.doctor_kernels import (
    Finding,
    check_compiler,
    check_instructions,
    check_machine_code,
    check_numba,
    check_triton,
)

GIB = 2**30
NEEDED_MEMORY_GIB = 1.5
"""What the course asks of a machine: a notebook's kernel stays below this."""
NEEDED_DISK_GIB = 0.5

LAB_PACKAGES = ("ipykernel", "ipywidgets", "anywidget", "plotly")
SERVER_PACKAGES = ("jupyterlab", "voila")
SLOW_SETTINGS = {
    ("OMP_WAIT_POLICY", "passive"): "threads go to sleep between products, and decoding waits for them to wake",
    ("CUDA_LAUNCH_BLOCKING", "1"): "the host waits for every kernel",
}


def check_python() -> Finding:
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info >= (3, 14):
        return Finding("Python", "note", found, "labkit is tested on 3.10 to 3.13.")
    return Finding("Python", "ok", found)


def check_torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("PyTorch", "fail", "not installed", "Run `make lab`, or pip install 'torch>=2.6'.")
    import torch

    found = f"{torch.__version__}, {_build(torch)}"
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 6):
        return Finding("PyTorch", "fail", found, "labkit needs 2.6 or newer: pip install --upgrade torch.")
    return Finding("PyTorch", "ok", found)


def check_device() -> Finding:
    import torch

    if torch.cuda.is_available():
        index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        found = f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, sm_{properties.major}{properties.minor}"
        if (properties.major, properties.minor) < (8, 0):
            return Finding("Device", "note", found, "No fast bf16 before sm_80: labkit's dtype='auto' takes fp16 here.")
        return Finding("Device", "ok", found)
    if shutil.which("nvidia-smi") and torch.version.cuda is None:
        remedy = "There is an NVIDIA driver, but this torch is the CPU build: install the CUDA build (see pytorch.org)."
        return Finding("Device", "note", "CPU", remedy)
    if torch.backends.mps.is_available():
        return Finding("Device", "ok", "CPU; Apple GPU (MPS) present, used only after a self-check")
    return Finding("Device", "ok", "CPU (no GPU is needed)")


def check_threads() -> Finding:
    import torch

    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    n_threads = torch.get_num_threads()
    found = f"{n_threads} torch threads on {n_cores} usable cores"
    if n_threads > n_cores:
        return Finding("Threads", "note", found, f"More threads than cores slow each other: OMP_NUM_THREADS={n_cores}.")
    return Finding("Threads", "ok", found)


def check_settings() -> Finding:
    slow = {
        f"{name}={value}": why
        for (name, value), why in SLOW_SETTINGS.items()
        if os.environ.get(name, "").lower() == value
    }
    if slow:
        remedy = "; ".join(f"unset {setting.split('=')[0]}: {why}" for setting, why in slow.items()) + "."
        return Finding("Environment", "note", ", ".join(slow), remedy)
    return Finding("Environment", "ok", "no setting known to slow torch down")


def check_cpu() -> Finding:
    import torch

    blas = "MKL" if torch.backends.mkl.is_available() else _blas_name(torch.__config__.show())
    onednn = "oneDNN" if torch.backends.mkldnn.is_available() else "no oneDNN"
    features = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile") if name in _cpu_flags()]
    found = f"{torch.backends.cpu.get_cpu_capability()}, {blas}, {onednn}"
    if features:
        found += f"; {' '.join(features)}"
    if platform.machine().lower() in ("x86_64", "amd64") and features and "avx2" not in features:
        return Finding("CPU", "note", found, "Without AVX2 every product is several times slower.")
    return Finding("CPU", "ok", found)


def check_memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    found = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if memory.available < NEEDED_MEMORY_GIB * GIB:
        remedy = f"A notebook may need {NEEDED_MEMORY_GIB} GiB: shut down other kernels and programs."
        return Finding("Memory", "note", found, remedy)
    return Finding("Memory", "ok", found)


def check_cache_folder() -> Finding:
    from labkit.resources import cache_folder

    folder = cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free_gib = shutil.disk_usage(existing).free / GIB
    found = f"{folder}, {free_gib:.1f} GiB free"
    if not os.access(existing, os.W_OK):
        return Finding("Cache folder", "fail", found, "Not writable: set LABKIT_CACHE to a folder that is.")
    if free_gib < NEEDED_DISK_GIB:
        return Finding("Cache folder", "fail", found, f"Free {NEEDED_DISK_GIB} GiB, or set LABKIT_CACHE.")
    return Finding("Cache folder", "ok", found)


def check_model() -> Finding:
    from labkit.checkpoint.fetch import DEFAULT_MODEL, cached_path, sha256_of

    path = cached_path()
    if path is None:
        return Finding("Default model", "note", "not fetched yet", "Run `labkit fetch` (needs a network, once).")
    if sha256_of(path) != DEFAULT_MODEL.sha256:
        return Finding("Default model", "fail", f"{path} is damaged", "Run `labkit fetch`: it fetches the file again.")
    return Finding("Default model", "ok", f"{path.name}, {path.stat().st_size / 1e6:.1f} MB, SHA-256 as expected")


def check_notebook_packages() -> Finding:
    missing, old, present = _compare((*LAB_PACKAGES, *SERVER_PACKAGES))
    found = ", ".join(present) or "none"
    if missing or old:
        remedy = "; ".join(([f"missing: {', '.join(missing)}"] if missing else []) + old)
        return Finding("Notebooks", "fail", found, f"{remedy}. Run `make lab`, or pip install 'labkit[jupyter]'.")
    return Finding("Notebooks", "ok", found)


def check_browser() -> Finding:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        return Finding("Chromium", "note", "none", "Only `make test` drives it (tests/browser); the course does not.")
    return Finding("Chromium", "ok", f"{found} (for the tests)")


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_torch,
    check_device,
    check_threads,
    check_settings,
    check_cpu,
    check_instructions,
    check_memory,
    check_cache_folder,
    check_model,
    check_notebook_packages,
    check_numba,
    check_machine_code,
    check_triton,
    check_compiler,
    check_browser,
)


def examine(checks: tuple[Callable[[], Finding], ...] = CHECKS) -> list[Finding]:
    """Run the checks in order."""
    return [_guarded(check) for check in checks]


def _guarded(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - whatever a broken machine throws is the finding
        name = check.__name__.removeprefix("check_").replace("_", " ").capitalize()
        return Finding(name, "fail", f"{type(error).__name__}: {error}", "Run `make lab` again, then report it.")


def verdict(findings: list[Finding]) -> str:
    """The report's last line."""
    failed = [finding.check for finding in findings if finding.status == "fail"]
    if failed:
        return f"labkit cannot work fully here yet: mend {', '.join(failed)}."
    return "labkit works here."


def to_json(findings: list[Finding]) -> str:
    return json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False)


def _build(torch: Any) -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda} build"
    return "ROCm build" if getattr(torch.version, "hip", None) else "CPU build"


def _blas_name(config: str) -> str:
    return next((name for name in ("OpenBLAS", "Accelerate", "BLIS") if name.lower() in config.lower()), "BLAS unknown")


def _cpu_flags() -> set[str]:
    """The instruction sets that the kernel reports; empty where it does not say (macOS, Windows)."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())


def _compare(names: tuple[str, ...]) -> tuple[list[str], list[str], list[str]]:
    """Of these packages: the missing ones, the ones older than labkit's floor, and the versions of the present ones."""
    from packaging.requirements import Requirement

    floors = {
        requirement.name: requirement.specifier
        for requirement in map(Requirement, metadata.requires("labkit") or [])
        if requirement.name in names
    }
    missing, old, present = [], [], []
    for name in names:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        present.append(f"{name} {version}")
        if name in floors and not floors[name].contains(version, prereleases=True):
            old.append(f"{name} {version} is not {floors[name]}")
    return missing, old, present
