"""Where labkit's files lie: its data (prompts, tables, recorded runs), and what it keeps on a user's machine."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
CACHE_VARIABLE = "LABKIT_CACHE"


def cache_folder() -> Path:
    """The user's cache folder for labkit, or what the environment variable LABKIT_CACHE says."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("labkit"))


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
