"""Where fetched models are kept, and the two rules of that folder: one writer at a time, no half-made files."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from labkit.resources import CACHE_VARIABLE

OFFLINE_VARIABLE = "LABKIT_OFFLINE"
_SCRATCH_PREFIX = "unfinished-"
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


def is_offline() -> bool:
    """Whether the user forbids network access (LABKIT_OFFLINE or HF_HUB_OFFLINE)."""
    return any(
        os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")
        for name in (OFFLINE_VARIABLE, "HF_HUB_OFFLINE")
    )


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: a second process waits, and says so."""
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        try:
            lock.acquire(timeout=0.2)
        except Timeout:
            print(f"Another process is fetching into {folder}: waiting for it.", file=sys.stderr)
            lock.acquire()
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise type(error)(
            f"cannot write to the cache folder {folder}: {error.strerror}. Set {CACHE_VARIABLE} to a folder of yours."
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A folder for unfinished work inside ``folder``, gone afterwards, whatever happens.

    Call it under the lock: it also clears what a killed process left behind.
    """
    for leftover in folder.glob(f"{_SCRATCH_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    path = Path(mkdtemp(prefix=_SCRATCH_PREFIX, dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Raise OSError (ENOSPC) before starting what cannot be finished."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise disk_full(folder, needed_bytes, free_bytes)


def disk_full(folder: Path, needed_bytes: int, free_bytes: int) -> OSError:
    """The error for a full disk: what is needed, what there is, what to do."""
    return OSError(
        errno.ENOSPC,
        f"the disk is full: fetching needs {needed_bytes / 1e6:.0f} MB in {folder} and {free_bytes / 1e6:.0f} MB "
        f"are free. Make room, or set {CACHE_VARIABLE} to a folder on a larger disk",
    )


def is_disk_full(error: OSError) -> bool:
    """Whether ``error`` says that the disk or the user's quota is exhausted."""
    return error.errno in _FULL
