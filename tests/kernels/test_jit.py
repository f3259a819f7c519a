"""How the compiled step is compiled: one version of each function."""

from __future__ import annotations

import re
from pathlib import Path

from numba import njit

from labkit.kernels.cpu import memory
from labkit.kernels.cpu.jit import jit


def test_a_constant_argument_makes_no_version_of_its_own():
    @jit
    def add(x, y):
        return x + y

    @njit
    def caller(x):
        return add(x, 1) + add(x, 2) + add(3, x)

    assert caller(10) == 11 + 12 + 13
    assert len(add.signatures) == 1


def test_sizes_of_memory_are_the_same_in_compiled_code():
    @njit
    def compiled(d, n_shared, n_threads):
        return memory.few_floats(d, n_shared), memory.product_bytes(n_threads, d, n_threads), memory.row_bytes(d)

    for sizes in ((64, 3, 2), (8, 1, 1), (80, 200, 7)):
        d, n_shared, n_threads = sizes
        plain = memory.few_floats(d, n_shared), memory.product_bytes(n_threads, d, n_threads), memory.row_bytes(d)
        assert compiled(*sizes) == plain


def test_numba_itself_is_imported_before_its_parts():
    """A thread that asks for a part while another one imports numba would not wait for it, and fail."""
    folder = Path(jit.__globals__["__file__"]).parent
    first = {
        path.name: re.findall(r"^(?:from|import) (numba\S*)", path.read_text(), re.M)[:1]
        for path in folder.glob("*.py")
    }
    assert {name: found for name, found in first.items() if found not in ([], ["numba"])} == {}
    assert first["simd.py"] == first["stored.py"] == ["numba"]
