"""numba's ``njit`` as the compiled step wants it: without the interpreter's lock, and no more compiled than is called.

Left alone, numba compiles a function anew for each constant that it is called with (and all that it calls), makes
machine code of every part on its own, and wraps each for Python: half of the time that a machine's first run waits for.
How much memory the parts need (``memory``) is plain Python, which compiled code may call too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit, types
from numba.core.caching import FunctionCache
from numba.extending import register_jitable

from labkit.kernels.cpu import memory
from labkit.kernels.cpu.code_files import digest

_ALL = {"nogil": True, "error_model": "numpy"}
MARKER = "labkit-compiled-from"
"""A file beside numba's: the digest of the sources that what lies there was compiled from."""


def forget_stale(sources: Path, kept: Path) -> bool:
    """Remove what was compiled from other sources than those below a folder; whether there was any. numba looks at the
    one file that a function stands in, not at those whose functions it calls: after an update it would run old ones."""
    now, marker = digest(sources), kept / MARKER
    try:
        if marker.exists() and marker.read_text() == now:
            return False
        stale = [path for pattern in ("*.nbi", "*.nbc") for path in kept.glob(pattern)]
        for path in stale:
            path.unlink()
        kept.mkdir(parents=True, exist_ok=True)
        marker.write_text(now)
    except OSError:  # somebody else's folder: numba does not write there either
        return False
    return bool(stale)


forget_stale(Path(__file__).parent.parent, Path(FunctionCache(forget_stale).cache_path))


def jit(function: Callable[..., Any]) -> Any:
    """A part of the compiled step. A constant argument is a number like any other."""
    return _plain(njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_ALL)(function))


def _plain(made: Any) -> Any:
    template = made.get_call_template
    made.get_call_template = lambda args, kws: template(tuple(map(types.unliteral, args)), kws)
    return made


for size in memory.IN_COMPILED_CODE:
    register_jitable(**_ALL)(size)
