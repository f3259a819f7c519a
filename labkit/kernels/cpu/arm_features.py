"""Which dot products an Arm processor has, asked of the system: LLVM's own list leaves them out (LLVM 22, Linux).

Names are LLVM's: dotprod, i8mm.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

AUXILIARY = {"dotprod": (16, 1 << 20), "i8mm": (26, 1 << 13)}
"""Linux: the entry of the auxiliary vector (AT_HWCAP, AT_HWCAP2) and the bit in it."""
CONTROLS = {"dotprod": b"hw.optional.arm.FEAT_DotProd", "i8mm": b"hw.optional.arm.FEAT_I8MM"}
"""macOS: 1 where the processor has it."""


def found() -> set[str]:
    """Those that this processor has and the system lets a program use; none on a system that is not known here."""
    with suppress(OSError, AttributeError):  # a C library without the call
        if sys.platform == "linux":
            return {name for name, (entry, bit) in AUXILIARY.items() if _auxiliary(entry) & bit}
        if sys.platform == "darwin":
            return {name for name, control in CONTROLS.items() if _control(control) == 1}
    return set()


def _auxiliary(entry: int) -> int:
    ask = ctypes.CDLL(None).getauxval
    ask.restype, ask.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return int(ask(entry))


def _control(name: bytes) -> int:
    value, size = ctypes.c_int(0), ctypes.c_size_t(4)
    ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return value.value
