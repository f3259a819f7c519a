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
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from labkit.resources import cache_folder

SIGNATURES = {
    "run": "vii",
    "serve": "iiiiiii",
    "publish": "iiii",
    "meet": "viii",
    "stretch": "viiiiiiiiiif",
    "matmul": "viii",
    "decode": "viii",
    "prefill": "viii",
}
"""By function: what it returns and takes (v nothing, i int64, f float32); compiled in this order, the quick first."""
C_TYPES: dict[str, Any] = {"v": None, "i": ctypes.c_int64, "f": ctypes.c_float}
UNREACHED = (
    "NRT_Free", "NRT_MemInfo_call_dtor", "numba_do_raise", "numba_gil_ensure", "numba_gil_release",
    "numba_runtime_build_excinfo_struct", "numba_unpickle",
)  # fmt: skip
"""Of numba's own library, for exceptions and for arrays that own memory: compiled code names these, and reaches none,
since it raises nothing and allocates nothing. Reached all the same, they would end the process."""
FROM_C = ("erff", "expf", "logf", "tanhf", "memset", "memcpy")
NAMES, PART = "names.json", ".part"

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

        made: dict[str, Any] = {}
        objects = parts()
        for name in SIGNATURES:
            if name not in objects:
                made[name] = compiling.compile_one(name)
                if {need for need in made[name].needs if need.startswith(("numba_", "NRT_"))} <= set(UNREACHED):
                    objects[name] = made[name].symbol, made[name].content
                    keep_parts(objects)
        if len(objects) == len(SIGNATURES):
            for folder in folders():
                if keep(objects, folder) and _load_file(folder / file_name()):
                    return
        held = {name: made.get(name) or compiling.compile_one(name) for name in SIGNATURES}
        _kept.append(held)
        _addresses.update({name: one.address for name, one in held.items()})


def parts() -> dict[str, tuple[str, bytes]]:
    """What a process compiled that ended before it had all: symbol and machine code by function."""
    for folder in folders():
        if objects := _read(folder / f"{file_name()}{PART}"):
            return objects
    return {}


def keep_parts(objects: dict[str, tuple[str, bytes]]) -> None:
    """For the next process, should this one end too soon: a command's may last some seconds."""
    for folder in folders():
        unfinished = folder / f"{file_name()}.{os.getpid()}"
        try:
            _write(unfinished, objects)
            unfinished.replace(folder / f"{file_name()}{PART}")
            return
        except OSError:
            continue
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)


def _write(path: Path, objects: dict[str, tuple[str, bytes]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(NAMES, json.dumps({name: symbol for name, (symbol, _) in objects.items()}))
        for name, (_, content) in objects.items():
            file.writestr(name, content)


def _read(path: Path) -> dict[str, tuple[str, bytes]]:
    """A file's functions; none when it is missing or damaged."""
    try:
        with zipfile.ZipFile(path) as file:
            symbols = json.loads(file.read(NAMES))
            return {name: (symbol, file.read(name)) for name, symbol in symbols.items() if name in SIGNATURES}
    except (OSError, ValueError, KeyError, AttributeError, zipfile.BadZipFile):
        return {}


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
        _write(unfinished, objects)
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
        (folder / f"{name}{PART}").unlink(missing_ok=True)
        for other in folder.glob("labkit-*.zip*"):
            if not other.name.startswith(sources):
                other.unlink()
    except (OSError, subprocess.SubprocessError):
        return False
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return True


def _load_file(path: Path) -> bool:
    """Take the functions from a file; False when it is damaged."""
    import llvmlite.binding as llvm

    objects = _read(path)
    if len(objects) < len(SIGNATURES):
        return False
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    library = ctypes.CDLL("ucrtbase" if sys.platform == "win32" else None)
    for name, called in [(name, "abort") for name in UNREACHED] + [(name, name) for name in FROM_C]:
        if llvm.address_of_symbol(name) is None and hasattr(library, called):
            llvm.add_symbol(name, ctypes.cast(getattr(library, called), ctypes.c_void_p).value)
    target = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
    for _, content in objects.values():
        engine.add_object_file(llvm.ObjectFileRef.from_data(content))
    engine.finalize_object()
    found = {name: engine.get_function_address(objects[name][0]) for name in SIGNATURES}
    if not all(found.values()):
        return False
    _kept.append(engine)
    _addresses.update(found)
    return True


if __name__ == "__main__":
    sys.exit(0 if _load_file(Path(sys.argv[1])) else 1)
