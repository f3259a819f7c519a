"""Where labkit's files lie: its data (prompts, tables, recorded runs), and what it keeps on a user's machine."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent
CACHE_VARIABLE = "LABKIT_CACHE"


def cache_folder() -> Path:
    """The user's cache folder for labkit, or what the environment variable LABKIT_CACHE says.

    A relative LABKIT_CACHE means the folder that labkit was started in, for the processes that it starts too. Where the
    user has no home (no HOME, a number without a name), a folder of the user's own beside other temporary files.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    with suppress(RuntimeError):  # what "~" and platformdirs say of somebody without a home
        if chosen:
            path = Path(chosen).expanduser()
            if not path.is_absolute():
                path = path.absolute()
                os.environ[CACHE_VARIABLE] = str(path)
            return path
        from platformdirs import user_cache_dir

        path = Path(user_cache_dir("labkit"))
        if path.is_absolute():
            return path
    whose = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"labkit-{whose}"


def data_path(*parts: str) -> Path:
    """The path of ``data/<parts>``, in an installed labkit (``labkit/data``) as in a clone (``data``, at its top).

    Raises FileNotFoundError that names the file when the installation lacks it.

    >>> data_path("prompts").is_dir()
    True
    """
    for root in (_PACKAGE / "data", _PACKAGE.parent / "data"):
        path = root.joinpath(*parts)
        if path.exists():
            return path
    raise FileNotFoundError(
        f"labkit's data file {'/'.join(parts)!r} is missing. Install labkit again (pip install -e . in a clone)."
    )


MALFORMED = (KeyError, IndexError, TypeError, AttributeError, ArithmeticError, RecursionError, UnicodeError)
"""What code that reads a stranger's values may raise on values of other kinds than it expects. Whoever reads a file
makes a ValueError of these, once for the whole file: no list of checks is complete."""
SPARE_BYTES = 200_000_000
"""A file's content may take twice the file's size in memory, and this much."""


def read_json_object(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a file.

    Raises ValueError when it is not one, is longer than ``max_bytes``, or would take far more memory than the file
    has bytes: three characters (``{},``) make 72 bytes in Python. Only regular files are read.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file.")
    with open(path, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path} has more than {max_bytes:,} bytes: too large for a {path.name}.")
    in_memory = len(data) + 192 * data.count(b"{") + 72 * data.count(b"[") + 28 * data.count(b'"')
    in_memory += 40 * data.count(b",")
    if in_memory > 2 * len(data) + SPARE_BYTES:
        raise ValueError(
            f"{path} would take {in_memory / 1e6:,.0f} MB of memory for {len(data) / 1e6:,.1f} MB: it holds more "
            "objects than any published file. It is damaged or hostile."
        )
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # bad UTF-8 is a ValueError too
        raise ValueError(f"{path} is not valid JSON ({error}). Fetch or copy it again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object.")
    return value
