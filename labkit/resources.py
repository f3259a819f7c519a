"""Where labkit's data files lie: prompts, tables, recorded runs, small trained weights."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


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
