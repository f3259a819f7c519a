"""How the compiled step is compiled: one version of each function, and none from sources that have changed."""

from __future__ import annotations

import re
from pathlib import Path

from numba import njit

from labkit.kernels.cpu import memory
from labkit.kernels.cpu.jit import MARKER, forget_stale, jit


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


def test_what_was_compiled_from_other_sources_is_forgotten(tmp_path):
    sources, kept = tmp_path / "sources", tmp_path / "kept"
    sources.mkdir()
    (sources / "a.py").write_text("one")
    assert not forget_stale(sources, kept)  # nothing was there
    compiled = [kept / name for name in ("a.f-1.py311.nbi", "a.f-1.py311.1.nbc")]
    for path in compiled:
        path.write_bytes(b"machine code")
    assert not forget_stale(sources, kept)
    assert all(path.exists() for path in compiled)
    (sources / "b.py").write_text("a file that a.py imports")
    assert forget_stale(sources, kept)
    assert not any(path.exists() for path in compiled)
    assert not forget_stale(sources, kept)


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / MARKER).write_text("of other sources")

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refuse)
    assert not forget_stale(tmp_path, tmp_path)


def test_numba_itself_is_imported_before_its_parts():
    """A thread that asks for a part while another one imports numba would not wait for it, and fail."""
    folder = Path(jit.__globals__["__file__"]).parent
    first = {
        path.name: re.findall(r"^(?:from|import) (numba\S*)", path.read_text(), re.M)[:1]
        for path in folder.glob("*.py")
    }
    assert {name: found for name, found in first.items() if found not in ([], ["numba"])} == {}
    assert first["simd.py"] == first["stored.py"] == ["numba"]
