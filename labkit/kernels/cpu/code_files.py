"""The files that keep compiled functions on a machine: one with all of them, and before that one for each.

A file is for one processor and one state of the sources: its name says which, and so does its first line, with a digest
over all that follows, so that no damaged and no foreign byte is loaded. It lies in the package's own folder where that
can be written to, else in the user's cache folder; where somebody else owns a folder or a file, or may write to it, it
is neither read nor written.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from labkit.kernels.cpu import tiers
from labkit.resources import cache_folder

NAMES, PART = "names.json", ".part"
PATIENCE_S = 300.0
"""How long a process waits for one that compiles the same: after that it has been stopped, or hangs."""
MAX_BYTES = 256 << 20
Objects = dict[str, tuple[str, bytes]]
"""Compiled functions by name: symbol and machine code."""


def folders() -> tuple[Path, ...]:
    """Where files are looked for, and the first that can be written to takes a new one."""
    return Path(__file__).parent / "__pycache__", cache_folder() / "compiled"


def file_name() -> str:
    """Of the sources, the compiler, the processor and the tier of its instructions that is used. Raises ValueError when
    LABKIT_CPU names none that it has."""
    return f"{_here()}-{tiers.in_use().name}.zip"


@lru_cache(maxsize=1)
def _here() -> str:
    import llvmlite.binding as llvm

    compiler = [version("numba"), version("llvmlite"), platform.machine(), sys.platform, llvm.get_host_cpu_name()]
    here = hashlib.sha256(json.dumps([compiler, sorted(tiers.features())]).encode()).hexdigest()[:12]
    return f"labkit-{digest(Path(__file__).parent.parent)[:12]}-{here}"


def digest(sources: Path) -> str:
    """Of every source file below a folder."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources.rglob("*.py")))).hexdigest()


def ours() -> tuple[Path, ...]:
    """Those of ``folders`` that nobody else owns or may write to; one that is not there yet is made."""
    return tuple(folder for folder in folders() if _make(folder) and not _strangers(os.stat(folder)))


def refused() -> list[str]:
    """Folders and files that are not used, for ``labkit doctor``: each with the reason."""
    said = []
    for folder in folders():
        for path in (folder, folder / file_name()):
            with suppress(OSError):
                if why := _strangers(os.stat(path)):
                    said.append(f"{path}: {why}")
    return said


def _make(folder: Path) -> bool:
    with suppress(OSError):
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    return folder.is_dir()


def _strangers(found: os.stat_result) -> str | None:
    """Why something on disk is somebody else's to change; None when it is not. Root's counts as ours to read."""
    if not hasattr(os, "geteuid"):  # Windows: a user's own folders are closed to others
        return None
    if found.st_uid not in (0, os.geteuid()):
        return f"user {found.st_uid} owns it"
    if found.st_mode & stat.S_IWOTH:
        return "everybody may write to it"
    if found.st_mode & stat.S_IWGRP and not (found.st_gid == os.getegid() == found.st_uid == os.geteuid()):
        return f"group {found.st_gid} may write to it"  # a group of one, named as its user, is the user
    return None


def is_kept() -> bool:
    """Whether there is a file with all functions, perhaps a damaged one."""
    return any((folder / file_name()).is_file() for folder in ours())


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Held by one process of a machine at a time, for as long as it lives; where nothing can be locked, or not in
    time, by each."""
    from filelock import FileLock

    with ExitStack() as held:
        for folder in ours():
            with suppress(OSError, NotImplementedError):
                held.enter_context(FileLock(folder / f"{file_name()}.{name}.lock", timeout=PATIENCE_S))
                break
        yield


def read(path: Path) -> Objects:
    """A file's functions; none when it is missing, damaged, a link, made for another machine, or a stranger's."""
    try:
        content = _bytes(path)
        first, _, body = content.partition(b"\n")
        if first != _first_line(body):
            return {}
        with zipfile.ZipFile(io.BytesIO(body)) as file:
            symbols = json.loads(file.read(NAMES))
            return {name: (symbol, file.read(name)) for name, symbol in symbols.items()}
    except (OSError, ValueError, KeyError, AttributeError, zipfile.BadZipFile):
        return {}


def _first_line(body: bytes) -> bytes:
    """Whom the file is for (sources, compiler, processor), and the digest of that and of what follows."""
    whom = file_name().encode()
    return b"labkit machine code for " + whom + b" " + hashlib.sha256(whom + body).hexdigest().encode()


def _bytes(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or _strangers(found) or found.st_size > MAX_BYTES:
            return b""
        return file.read()


def parts(names: Collection[str]) -> Objects:
    """Those of the named functions that were kept one by one: by a process that may have ended too soon."""
    found: Objects = {}
    for name in names:
        for folder in ours():
            found = read(_part(folder, name)) | found
    return {name: found[name] for name in names if name in found}


def count_parts(names: Collection[str]) -> int:
    """How many of them ``parts`` would find."""
    return sum(any(_part(folder, name).is_file() for folder in ours()) for name in names)


def can_keep() -> bool:
    """Whether there is a folder to write to."""
    return any(os.access(folder, os.W_OK) for folder in ours())


def keep_part(name: str, symbol: str, content: bytes) -> None:
    """For another process; where nothing can be written, nothing is kept."""
    for folder in ours():
        if _put(_part(folder, name), {name: (symbol, content)}):
            return


def keep(objects: Objects) -> bool:
    """Write one file with all functions, in place of those from other sources; whether it could be done. A new process
    tries the file first: LLVM ends a process that asks it for what is not there."""
    return any(_keep(objects, folder) for folder in ours())


def _keep(objects: Objects, folder: Path) -> bool:
    if not _put(folder / file_name(), objects, tried=True):
        return False
    sources = "-".join(file_name().split("-")[:2])
    with suppress(OSError):
        for other in folder.glob("labkit-*.zip*"):
            if not other.name.startswith(sources) or other.name.startswith(f"{file_name()}."):
                other.unlink(missing_ok=True)
    return True


def _part(folder: Path, name: str) -> Path:
    return folder / f"{file_name()}.{name}{PART}"


def _put(path: Path, objects: Objects, *, tried: bool = False) -> bool:
    """Write a file that is there whole or not at all; whether it is. Until it is whole it has a name that nobody can
    know ahead, and is a new file, never one that a link leads to."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr(NAMES, json.dumps({name: symbol for name, (symbol, _) in objects.items()}))
        for name, (_, content) in objects.items():
            file.writestr(name, content)
    unfinished = None
    try:
        handle, unfinished = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
        with open(handle, "wb") as out:
            out.write(_first_line(packed.getvalue()) + b"\n" + packed.getvalue())
        os.chmod(unfinished, 0o644)
        if tried and not _loads(Path(unfinished)):
            return False
        os.replace(unfinished, path)
    except (OSError, subprocess.SubprocessError):
        return False
    finally:
        if unfinished is not None:
            with suppress(OSError):
                os.unlink(unfinished)
    return True


def _loads(path: Path) -> bool:
    """Whether a new process can load the file."""
    command = [sys.executable, "-m", "labkit.kernels.cpu.machine_code", str(path.resolve())]
    return subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, timeout=60).returncode == 0
