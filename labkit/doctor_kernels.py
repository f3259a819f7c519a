"""What the doctor finds about compilers and what they made: numba, Triton, C++, and the kernels' machine code."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from importlib import import_module, metadata

THREADING_LAYERS = {"omp": "omppool", "tbb": "tbbpool", "workqueue": "workqueue"}


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``status``: "ok", "note" (works, with a limit worth knowing) or "fail"."""

    check: str
    status: str
    found: str
    remedy: str = ""


def check_instructions() -> Finding:
    """Which of the processor's instructions the compiled products use."""
    name = "Instructions"
    if importlib.util.find_spec("llvmlite") is None:
        return Finding(name, "note", "no compiler")
    from labkit.kernels.cpu import tiers

    has = ", ".join(tier.name for tier in tiers.available())
    try:
        choice = tiers.choice()
    except ValueError as error:
        return Finding(name, "fail", f"of {has}", str(error))
    tried = "" if choice.tier.name in tiers.CHECKED else ", tried on this machine,"
    found = f"{choice.tier.name} ({choice.tier.uses}){tried} of {has}"
    if choice.refused:
        remedy = "; ".join(f"{tier} is not used: {reason}" for tier, reason in choice.refused) + "."
        return Finding(name, "note", found, remedy)
    if os.environ.get(tiers.VARIABLE):
        return Finding(name, "note", found, f"{tiers.VARIABLE} asks for it; unset it for the best.")
    return Finding(name, "ok", found)


def check_numba() -> Finding:
    if importlib.util.find_spec("numba") is None:
        return Finding("numba", "note", "not installed", "The compiled CPU step needs it: pip install numba.")
    layers = [layer for layer, module in THREADING_LAYERS.items() if _imports(f"numba.np.ufunc.{module}")]
    found = f"{metadata.version('numba')}, threading layers: {' '.join(layers)}"
    if "omp" not in layers and "tbb" not in layers:
        remedy = "workqueue is far slower: install libgomp (Linux), or pip install tbb."
        return Finding("numba", "note", found, remedy)
    return Finding("numba", "ok", found)


def check_machine_code() -> Finding:
    name = "Machine code"
    if importlib.util.find_spec("numba") is None:
        return Finding(name, "note", "no compiler")
    from labkit.kernels.cpu import code_files, tiers

    try:
        tiers.choice()
    except ValueError:
        return Finding(name, "note", "not looked for", "See Instructions.")
    if refused := code_files.refused():
        remedy = "Not loaded and not written. Give it to yourself alone (chown, chmod go-w), or set LABKIT_CACHE."
        return Finding(name, "note", "; ".join(refused), remedy)
    found = [path for folder in code_files.ours() if (path := folder / code_files.file_name()).is_file()]
    if not found:
        return Finding(name, "note", "none yet", "`labkit prepare` compiles it, about a minute, once.")
    if not code_files.read(found[0]):
        return Finding(name, "note", f"{found[0]} is damaged", "The next run makes it anew, or `labkit prepare` now.")
    return Finding(name, "ok", f"{found[0].name}, digest as expected")


def check_triton() -> Finding:
    if importlib.util.find_spec("triton") is None:
        return Finding("Triton", "ok", "not installed: plain PyTorch stands in for its GPU kernels")
    return Finding("Triton", "ok", metadata.version("triton"))


def check_compiler() -> Finding:
    found = next((path for path in map(shutil.which, ("c++", "g++", "clang++", "cl")) if path), None)
    if found is None:
        return Finding("C++ compiler", "note", "none", "Only torch.compile needs one; everything else runs without.")
    return Finding("C++ compiler", "ok", found)


def _imports(module: str) -> bool:
    try:
        import_module(module)
    except (ImportError, OSError):
        return False
    return True
