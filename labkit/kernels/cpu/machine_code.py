"""The compiled functions as machine code: compiled once on a machine, then loaded from a file in milliseconds.

numba keeps what it compiled too, but to load that it reads in all that it knows about types first: over a second of
the interpreter's time at the start of every session, beside the reading of the model. Here LLVM's loader alone is
asked, and numba is not even imported. A file is for one processor and one state of the sources: its name says which.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import subprocess
import sys
import threading
import zipfile
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from labkit.resources import cache_folder

SIGNATURES = {
    "decode": "viii",
    "prefill": "viii",
    "matmul": "viii",
    "meet": "viii",
    "run": "vii",
    "serve": "iiiiiii",
    "publish": "iiii",
    "stretch": "viiiiiiiiiif",
}
"""By function: what it returns and takes. v nothing, i int64, f float32."""
C_TYPES: dict[str, Any] = {"v": None, "i": ctypes.c_int64, "f": ctypes.c_float}
UNREACHED = (
    "NRT_Free", "NRT_MemInfo_call_dtor", "numba_do_raise", "numba_gil_ensure", "numba_gil_release",
    "numba_runtime_build_excinfo_struct", "numba_unpickle",
)  # fmt: skip
"""Of numba's own library, for exceptions and for arrays that own memory: compiled code names these, and reaches none,
since it raises nothing and allocates nothing. Reached all the same, they would end the process."""
FROM_C = ("erff", "expf", "logf", "tanhf", "memset", "memcpy")
NAMES = "names.json"

_addresses: dict[str, int] = {}
_lock = threading.Lock()
_kept: list[Any] = []
"""What holds the machine code, as long as its addresses may be called."""


def address(name: str) -> int:
    """Where a compiled function lies. The first call of a process loads all of them, of a machine compiles them."""
    if name not in _addresses:
        load()
    return _addresses[name]


@lru_cache(maxsize=len(SIGNATURES))
def function(name: str) -> Any:
    """The compiled function, to be called from Python without the interpreter's lock."""
    gives, *takes = (C_TYPES[letter] for letter in SIGNATURES[name])
    return ctypes.CFUNCTYPE(gives, *takes)(address(name))


def load() -> None:
    """Have every function in memory: from the file, or compiled, which takes about a minute, and then kept."""
    with _lock:
        if _addresses:
            return
        for folder in folders():
            if (path := folder / file_name()).is_file() and _load_file(path):
                return
        from labkit.kernels.cpu import compiling

        made = compiling.compile_all()
        _kept.append(made)
        _addresses.update(made.addresses)
        if {name for name in made.needs if name.startswith(("numba_", "NRT_"))} <= set(UNREACHED):
            any(keep(made.objects, folder) for folder in folders())


def folders() -> tuple[Path, ...]:
    """Where files are looked for, and the first that can be written to takes a new one."""
    return Path(__file__).parent / "__pycache__", cache_folder() / "compiled"


@lru_cache(maxsize=1)
def file_name() -> str:
    """Of the sources, the compiler and the processor."""
    import llvmlite.binding as llvm

    try:
        features = sorted(name for name, has in llvm.get_host_cpu_features().items() if has)
    except RuntimeError:  # LLVM does not know them on every system
        features = []
    compiler = [version("numba"), version("llvmlite"), platform.machine(), sys.platform, llvm.get_host_cpu_name()]
    here = hashlib.sha256(json.dumps([compiler, features]).encode()).hexdigest()[:12]
    return f"labkit-{digest(Path(__file__).parent.parent)[:12]}-{here}.zip"


def digest(sources: Path) -> str:
    """Of every source file below a folder."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources.rglob("*.py")))).hexdigest()


def keep(objects: dict[str, tuple[str, bytes]], folder: Path) -> bool:
    """Write the functions' names and objects to the folder, in place of those from other sources; whether it could be
    done. A new process tries the file first: LLVM ends a process that asks it for what is not there."""
    name = file_name()
    unfinished = folder / f"{name}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(unfinished, "w") as file:
            file.writestr(NAMES, json.dumps({name: symbol for name, (symbol, _) in objects.items()}))
            for function_name, (_, content) in objects.items():
                file.writestr(function_name, content)
        tried = subprocess.run(
            [sys.executable, "-m", "labkit.kernels.cpu.machine_code", str(unfinished.resolve())],
            cwd=Path(__file__).parents[3],
            capture_output=True,
            timeout=60,
        )
        if tried.returncode != 0:
            return False
        unfinished.replace(folder / name)
        sources = name.rsplit("-", 1)[0]
        for other in folder.glob("labkit-*.zip"):
            if not other.name.startswith(sources):
                other.unlink()
    except (OSError, subprocess.SubprocessError):
        return False
    finally:
        unfinished.unlink(missing_ok=True)
    return True


def _load_file(path: Path) -> bool:
    """Take the functions from a file; False when it is damaged."""
    import llvmlite.binding as llvm

    try:
        with zipfile.ZipFile(path) as file:
            symbols = json.loads(file.read(NAMES))
            objects = [file.read(name) for name in SIGNATURES if symbols[name]]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return False
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    library = ctypes.CDLL("ucrtbase" if sys.platform == "win32" else None)
    for name, called in [(name, "abort") for name in UNREACHED] + [(name, name) for name in FROM_C]:
        if llvm.address_of_symbol(name) is None and hasattr(library, called):
            llvm.add_symbol(name, ctypes.cast(getattr(library, called), ctypes.c_void_p).value)
    target = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
    for content in objects:
        engine.add_object_file(llvm.ObjectFileRef.from_data(content))
    engine.finalize_object()
    found = {name: engine.get_function_address(symbols[name]) for name in SIGNATURES}
    if not all(found.values()):
        return False
    _kept.append(engine)
    _addresses.update(found)
    return True


if __name__ == "__main__":
    sys.exit(0 if _load_file(Path(sys.argv[1])) else 1)
