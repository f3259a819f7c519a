"""Which device and which dtype a model runs in, and whether it fits there."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from labkit.model.config import as_dtype, dtype_name

_SPARE_BYTES = 256 * 2**20
"""Left for activations, the cache and everything else."""


def choose_device(name: str | torch.device = "auto") -> torch.device:
    """CUDA when there is one, else the CPU; or the device asked for, checked.

    MPS is never chosen on its own: it runs only when asked for, and after it has agreed with the CPU.
    """
    if isinstance(name, str) and name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"unknown device {str(name)!r}: choose one of auto, cpu, cuda, cuda:0, cuda:1, ..., mps.")
    if device.type == "cuda":
        n_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= n_devices:
            raise ValueError(
                f"device {str(name)!r} is not there: torch {torch.__version__} sees {n_devices} CUDA devices. "
                "Use device='auto', or install a CUDA build of torch and check the driver (nvidia-smi)."
            )
    if device.type == "mps":
        _check_mps()
    return device


def _check_mps() -> None:
    if not torch.backends.mps.is_available():
        raise ValueError("device 'mps' is not available here: use device='auto'.")
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(33, 64, generator=generator), torch.randn(96, 64, generator=generator)
    there = torch.softmax(x.to("mps") @ w.to("mps").T, dim=-1).cpu()
    if not torch.allclose(there, torch.softmax(x @ w.T, dim=-1), atol=1e-4):
        raise ValueError("device 'mps' gives wrong results on this machine (self-check failed): use device='cpu'.")


def choose_dtype(name: str | torch.dtype, device: torch.device) -> torch.dtype:
    """bf16 where the hardware computes in it, else fp16 on a GPU and fp32 on a CPU; or the one asked for, checked."""
    if not isinstance(name, str) or name != "auto":
        dtype = as_dtype(name)
        _check_dtype(dtype, device)
        return dtype
    if device.type == "cuda":
        major, _ = torch.cuda.get_device_capability(device)
        return torch.bfloat16 if major >= 8 else torch.float16
    if device.type == "mps":
        return torch.float16
    return torch.bfloat16 if cpu_has_bf16() else torch.float32


def _check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    if device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] < 8:
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has no bf16 arithmetic (it begins with compute capability 8.0): "
            "use dtype='fp16'."
        )
    try:
        ones = torch.ones(2, 2, dtype=dtype, device=device)
        torch.mm(ones, ones)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device {device} cannot compute in {dtype_name(dtype)} ({error}): use dtype='fp32'."
        ) from error


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 itself (AVX-512 BF16, AMX, Arm BF16); emulation is slower than fp32."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64", "x86"):
        probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
        return bool(probe()) if probe is not None else "avx512_bf16" in _cpu_flags()
    return machine in ("aarch64", "arm64") and "bf16" in _cpu_flags()


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.split()[2:]}


def free_bytes(device: torch.device) -> int:
    """Memory that can be had on ``device`` now; on Linux a container's limit counts."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    available = psutil.virtual_memory().available
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no container, or no limit ("max")
        return available
    return min(available, max(limit - used, 0))


def check_fits(n_values: int, dtype: torch.dtype, device: torch.device, name: str) -> None:
    """Raise ValueError before allocating what does not fit, and say which switch would make it fit."""
    needed, free = n_values * dtype.itemsize + _SPARE_BYTES, free_bytes(device)
    if needed <= free:
        return
    ways = []
    if dtype.itemsize > 2 and n_values * 2 + _SPARE_BYTES <= free:
        ways.append(f"dtype='bf16' ({n_values * 2 / 1e9:.1f} GB)")
    if device.type != "cpu" and needed <= free_bytes(torch.device("cpu")):
        ways.append("device='cpu'")
    ways.append("a smaller model (labkit.models())")
    raise ValueError(
        f"{name} has {n_values / 1e9:.2f} billion weights: {needed / 1e9:.1f} GB in {dtype_name(dtype)}, "
        f"but {device} has {free / 1e9:.1f} GB free. What fits: {', or '.join(ways)}."
    )
