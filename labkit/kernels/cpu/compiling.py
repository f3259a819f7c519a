"""The functions that a team runs, compiled by numba.

python -m labkit.kernels.cpu.compiling step matmul     compiles these and keeps them (``compile_apart``)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numba import cfunc, config, types
from numba.core.codegen import get_host_cpu_features

from labkit.kernels.cpu import code_files, tiers
from labkit.kernels.cpu.loops import meet, publish, run, serve
from labkit.kernels.cpu.matmul import matmul
from labkit.kernels.cpu.signatures import SIGNATURES, UNREACHED
from labkit.kernels.cpu.step import step
from labkit.kernels.cpu.stretch import stretch

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "step": step,
    "matmul": matmul,
    "meet": meet,
    "run": run.py_func,
    "serve": serve.py_func,
    "publish": publish.py_func,
    "stretch": stretch,
}
_TYPES = {"v": types.void, "i": types.int64, "f": types.float32}


@dataclass(frozen=True)
class Compiled:
    """One function: where it lies, its symbol and machine code, and what the code calls beside itself."""

    address: int
    symbol: str
    content: bytes
    needs: set[str]
    held: Any
    """What keeps it in memory."""


def compile_one(name: str) -> Compiled:
    """Compile a function, on any thread. Raises RuntimeError where numba compiles for fewer features than the tier's:
    LLVM would end the process."""
    lacking = tiers.in_use().needs - _numbas_features()
    if lacking:
        raise RuntimeError(f"numba is told to do without {', '.join(sorted(lacking))}: set {tiers.VARIABLE}=plain.")
    gives, *takes = (_TYPES[letter] for letter in SIGNATURES[name])
    made: Any = cfunc(gives(*takes), nopython=True, error_model="numpy")(FUNCTIONS[name])
    library = made._library
    _, _, (content, _) = library.serialize_using_object_code()  # what numba itself keeps on disk
    needs = {function.name for function in library._final_module.functions if function.is_declaration}
    return Compiled(made.address, made._wrapper_name, content, needs, made)


def _numbas_features() -> set[str]:
    asked = config.CPU_FEATURES if config.CPU_FEATURES is not None else get_host_cpu_features()
    return {part[1:] for part in asked.split(",") if part.startswith("+")}


def compile_and_keep(names: Sequence[str]) -> None:
    """Leave functions in files, but those whose code calls what only numba has."""
    for name in names:
        made = compile_one(name)
        if {need for need in made.needs if need.startswith(("numba_", "NRT_"))} <= set(UNREACHED):
            code_files.keep_part(name, made.symbol, made.content)


def main(names: Sequence[str]) -> None:
    """Once: who asks for the same meanwhile waits, and finds it done."""
    with code_files.alone(names[0]):
        if not code_files.is_kept():
            had = code_files.parts(names)
            compile_and_keep([name for name in names if name not in had])


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(10)  # in no one's way
    main(sys.argv[1:])
