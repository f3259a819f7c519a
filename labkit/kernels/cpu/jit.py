"""numba's ``njit`` as the compiled step wants it: without the interpreter's lock, and no more compiled than is called.

Left alone, numba compiles a function anew for each constant that it is called with (and all that it calls), makes
machine code of every part on its own, and wraps each for Python: half of the time that a machine's first run waits for.
How much memory the parts need (``memory``) is plain Python, which compiled code may call too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding as llvm
from numba import njit, types
from numba.extending import register_jitable

from labkit.kernels.cpu import memory

llvm.initialize_native_asmparser()
"""Some instructions are written as assembly (``integer_dots``), which LLVM, left as numba starts it, cannot read."""

_ALL = {"nogil": True, "error_model": "numpy"}


def jit(function: Callable[..., Any]) -> Any:
    """A part of the compiled step. A constant argument is a number like any other."""
    return _plain(njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_ALL)(function))


def _plain(made: Any) -> Any:
    template = made.get_call_template
    made.get_call_template = lambda args, kws: template(tuple(map(types.unliteral, args)), kws)
    return made


for size in memory.IN_COMPILED_CODE:
    register_jitable(**_ALL)(size)
