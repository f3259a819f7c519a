"""The compiled functions as machine code: compiled once on a machine, then loaded from a file in milliseconds.

numba keeps what it compiled too, but to load that it reads in all that it knows about types first: over a second of
the interpreter's time at the start of every session, beside the reading of the model. Here LLVM's loader alone is
asked, and numba is not even imported.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from labkit.kernels.cpu import code_files, tiers
from labkit.kernels.cpu.signatures import C_TYPES, SIGNATURES, UNREACHED

FROM_C = ("erff", "expf", "logf", "tanhf", "memset", "memcpy")

_addresses: dict[str, int] = {}
_lock = threading.Lock()
_kept: list[Any] = []
"""What holds the machine code, as long as its addresses may be called."""


def address(name: str) -> int:
    """Where a compiled function lies. The first call of a process loads all of them, of a machine compiles them."""
    if name not in _addresses:
        load()
    return _addresses[name]


@lru_cache(maxsize=len(SIGNATURES))
def function(name: str) -> Any:
    """The compiled function, to be called from Python without the interpreter's lock."""
    gives, *takes = (C_TYPES[letter] for letter in SIGNATURES[name])
    return ctypes.CFUNCTYPE(gives, *takes)(address(name))


def load(progress: Callable[[int], None] = lambda n_compiled: None) -> None:
    """Have every function in memory: from the file, or compiled, which takes about a minute on one core, and kept.

    In this process itself only what every release is tested on is compiled: what another tier's instructions make of
    the compiler, or of a process that loads them, happens elsewhere, or the tier is not used."""
    with _lock:
        while not (_addresses or _load_kept() or _compile_apart(progress)):
            tier = tiers.in_use()
            if tier.name in tiers.CHECKED:
                _compile_here(progress)
            else:
                reason = "what was compiled for it could not be kept, or not loaded"
                tiers.refuse(tier, reason, keep=code_files.can_keep())


def _compile_apart(progress: Callable[[int], None]) -> bool:
    """Compile in processes of their own, keep what they leave, and load it; whether that could be done."""
    from labkit.kernels.cpu import compile_apart

    with suppress(OSError):  # no process can be started here
        compile_apart.compile_all(progress)
    if _load_kept():  # another process was first
        return True
    objects = code_files.parts(SIGNATURES)
    return len(objects) == len(SIGNATURES) and code_files.keep(objects) and _load_kept()


def _load_kept() -> bool:
    for folder in code_files.ours():
        path = folder / code_files.file_name()
        if path.is_file():
            if load_file(path):
                return True
            with suppress(OSError):  # damaged: to be made anew
                path.unlink()
    return False


def _compile_here(progress: Callable[[int], None]) -> None:
    """For this process alone: where no file can be kept."""
    from labkit.kernels.cpu import compiling

    for name in SIGNATURES:
        one = compiling.compile_one(name)
        _kept.append(one)
        _addresses[name] = one.address
        progress(len(_addresses))


def load_file(path: Path) -> bool:
    """Take the functions from a file; False when it is damaged."""
    import llvmlite.binding as llvm

    objects = code_files.read(path)
    if not set(SIGNATURES) <= set(objects):
        return False
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    library = ctypes.CDLL("ucrtbase" if sys.platform == "win32" else None)
    for name, called in [(name, "abort") for name in UNREACHED] + [(name, name) for name in FROM_C]:
        if llvm.address_of_symbol(name) is None and hasattr(library, called):
            llvm.add_symbol(name, ctypes.cast(getattr(library, called), ctypes.c_void_p).value)
    target = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
    for _, content in objects.values():
        engine.add_object_file(llvm.ObjectFileRef.from_data(content))
    engine.finalize_object()
    found = {name: engine.get_function_address(objects[name][0]) for name in SIGNATURES}
    if not all(found.values()):
        return False
    _kept.append(engine)
    _addresses.update(found)
    return True


if __name__ == "__main__":
    sys.exit(0 if load_file(Path(sys.argv[1])) else 1)
