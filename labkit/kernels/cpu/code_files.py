"""The files that keep compiled functions on a machine: one with all of them, and before that one for each.

A file is for one processor and one state of the sources: its name says which. It lies in the package's own folder
where that can be written to, else in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from labkit.resources import cache_folder

NAMES, PART = "names.json", ".part"
PATIENCE_S = 300.0
"""How long a process waits for one that compiles the same: after that it has been stopped, or hangs."""
Objects = dict[str, tuple[str, bytes]]
"""Compiled functions by name: symbol and machine code."""


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


def is_kept() -> bool:
    """Whether there is a file with all functions, perhaps a damaged one."""
    return any((folder / file_name()).is_file() for folder in folders())


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Held by one process of a machine at a time, for as long as it lives; where nothing can be locked, or not in
    time, by each."""
    from filelock import FileLock

    with ExitStack() as held:
        for folder in folders():
            with suppress(OSError, NotImplementedError):
                folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(FileLock(folder / f"{file_name()}.{name}.lock", timeout=PATIENCE_S))
                break
        yield


def read(path: Path) -> Objects:
    """A file's functions; none when it is missing or damaged."""
    try:
        with zipfile.ZipFile(path) as file:
            symbols = json.loads(file.read(NAMES))
            return {name: (symbol, file.read(name)) for name, symbol in symbols.items()}
    except (OSError, ValueError, KeyError, AttributeError, zipfile.BadZipFile):
        return {}


def parts(names: Collection[str]) -> Objects:
    """Those of the named functions that were kept one by one: by a process that may have ended too soon."""
    found: Objects = {}
    for name in names:
        for folder in folders():
            found = read(_part(folder, name)) | found
    return {name: found[name] for name in names if name in found}


def count_parts(names: Collection[str]) -> int:
    """How many of them ``parts`` would find."""
    return sum(any(_part(folder, name).is_file() for folder in folders()) for name in names)


def can_keep() -> bool:
    """Whether there is a folder to write to."""
    for folder in folders():
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return True
    return False


def keep_part(name: str, symbol: str, content: bytes) -> None:
    """For another process; where nothing can be written, nothing is kept."""
    for folder in folders():
        if _put(_part(folder, name), {name: (symbol, content)}):
            return


def keep(objects: Objects) -> bool:
    """Write one file with all functions, in place of those from other sources; whether it could be done. A new process
    tries the file first: LLVM ends a process that asks it for what is not there."""
    return any(_keep(objects, folder) for folder in folders())


def _keep(objects: Objects, folder: Path) -> bool:
    if not _put(folder / file_name(), objects, tried=True):
        return False
    sources = file_name().rsplit("-", 1)[0]
    with suppress(OSError):
        for other in folder.glob("labkit-*.zip*"):
            if not other.name.startswith(sources) or other.name.startswith(f"{file_name()}."):
                other.unlink(missing_ok=True)
    return True


def _part(folder: Path, name: str) -> Path:
    return folder / f"{file_name()}.{name}{PART}"


def _put(path: Path, objects: Objects, *, tried: bool = False) -> bool:
    """Write a file that is there whole or not at all; whether it is."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(unfinished, "w") as file:
            file.writestr(NAMES, json.dumps({name: symbol for name, (symbol, _) in objects.items()}))
            for name, (_, content) in objects.items():
                file.writestr(name, content)
        if tried and not _loads(unfinished):
            return False
        unfinished.replace(path)
    except (OSError, subprocess.SubprocessError):
        return False
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return True


def _loads(path: Path) -> bool:
    """Whether a new process can load the file."""
    command = [sys.executable, "-m", "labkit.kernels.cpu.machine_code", str(path.resolve())]
    return subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, timeout=60).returncode == 0
