"""The functions that are compiled: their names, what they take, and what their code names beside itself."""

from __future__ import annotations

import ctypes
from typing import Any

SIGNATURES = {
    "meet": "viii",
    "publish": "iiii",
    "run": "vii",
    "serve": "iiiiiii",
    "stretch": "viiiiiiiiiif",
    "matmul": "viii",
    "step": "viii",
}
"""By function: what it returns and takes (v nothing, i int64, f float32); compiled in this order, the longest last."""
C_TYPES: dict[str, Any] = {"v": None, "i": ctypes.c_int64, "f": ctypes.c_float}
UNREACHED = (
    "NRT_Free", "NRT_MemInfo_call_dtor", "numba_do_raise", "numba_gil_ensure", "numba_gil_release",
    "numba_runtime_build_excinfo_struct", "numba_unpickle",
)  # fmt: skip
"""Of numba's own library, for exceptions and for arrays that own memory: compiled code names these, and reaches none,
since it raises nothing and allocates nothing. Reached all the same, they would end the process."""
