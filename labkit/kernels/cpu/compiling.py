"""Every function that a team runs, compiled: what ``machine_code`` keeps. About a minute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from numba import cfunc, types

from labkit.kernels.cpu.loops import meet, publish, run, serve
from labkit.kernels.cpu.machine_code import SIGNATURES
from labkit.kernels.cpu.matmul import matmul
from labkit.kernels.cpu.prefill import prefill
from labkit.kernels.cpu.step import decode
from labkit.kernels.cpu.stretch import stretch

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "decode": decode,
    "prefill": prefill,
    "matmul": matmul,
    "meet": meet,
    "run": run.py_func,
    "serve": serve.py_func,
    "publish": publish.py_func,
    "stretch": stretch,
}
_TYPES = {"v": types.void, "i": types.int64, "f": types.float32}


@dataclass
class Compiled:
    """``addresses`` and ``objects`` (symbol, machine code) by function; ``held`` is what keeps them in memory."""

    addresses: dict[str, int] = field(default_factory=dict)
    objects: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)
    needs: set[str] = field(default_factory=set)
    """What the code calls beside itself."""


def compile_all() -> Compiled:
    """Compile everything, on any thread."""
    made = Compiled()
    for name, function in FUNCTIONS.items():
        gives, *takes = (_TYPES[letter] for letter in SIGNATURES[name])
        compiled: Any = cfunc(gives(*takes), nopython=True, error_model="numpy")(function)
        library = compiled._library
        _, _, (content, _) = library.serialize_using_object_code()  # what numba itself keeps on disk
        made.needs |= {f.name for f in library._final_module.functions if f.is_declaration}
        made.addresses[name] = compiled.address
        made.objects[name] = compiled._wrapper_name, content
        made.held.append(compiled)
    return made
