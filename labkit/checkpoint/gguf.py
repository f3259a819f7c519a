"""Read a GGUF file: metadata, and tensors by name, trusting nothing before it is checked.

The header's counts, lengths and offsets are compared with the file's size *before* anything is allocated
for them, so a damaged or hostile file ends in a ValueError. (The ``gguf`` package's own reader keeps a numpy
array for each of the vocabulary's strings, which takes seconds, and believes the counts it reads.)

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
import sys
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from labkit.checkpoint.stored_rows import StoredRows
from labkit.quant.blocks import block_layout, dequantize

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ITEMS = 2**21
"""Most entries in all metadata arrays; the largest vocabularies have a quarter of a million, merges twice that."""
MAX_KEYS, MAX_TENSORS = 2**16, 2**17
"""Far above any published file: each takes some hundred bytes of memory for a dozen in the file."""
PLAIN_ITEMS = 4096
"""A longer array of numbers stays packed (``array``), in the bytes that the file has for it."""
MAX_DIMENSIONS = 4
MAX_NESTING = 3

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_WIDTHS = {code: struct.calcsize("<" + form) for code, form in _SCALARS.items()}
_UINT64 = struct.Struct("<Q")


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. ``shape`` is in torch's order: rows first (GGUF stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    kind: str
    """``F32``, ``Q4_1``, ...: the name ggml gives the block format."""
    start: int
    nbytes: int


class GGUFFile:
    """An open GGUF file: ``metadata`` as plain Python values, ``tensors`` as name to ``TensorInfo``.

    Raises ValueError, saying where, when the file is truncated, corrupted or of a version that is not known.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():  # a pipe or a device would be waited for
            raise ValueError(f"{self.path} is not a regular file: models are read from files only.")
        with open(self.path, "rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise ValueError(f"{self.path.name} has {size} bytes: too short to be a GGUF file.")
            # private copy-on-write pages: torch wants writable memory, the file stays as it is
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            self.metadata, self.tensors = _Header(self._map, self.path.name).read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmap the file. Tensors read before stay valid: they are copies."""
        self._map.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """One tensor, dequantised into ``dtype``: a copy, laid out in rows."""
        info = self.tensors[name]
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=info.nbytes, offset=info.start)
        try:
            return dequantize(raw, info.kind, info.shape, dtype)
        finally:
            del raw  # an exported buffer would keep the file from being closed

    def items(
        self, dtype: torch.dtype = torch.float32, *, keep: Collection[str] = ()
    ) -> Iterator[tuple[str, torch.Tensor | StoredRows]]:
        """Every tensor, one at a time, in the file's order. Vectors (norms, biases) come in float32: they are
        small, and Gemma's norms must be shifted before they are rounded. ``keep``: the formats whose matrices come as
        they are packed."""
        for name, info in self.tensors.items():
            if info.kind in keep and len(info.shape) == 2:
                yield name, self.stored(name)
            else:
                yield name, self.tensor(name, dtype if len(info.shape) > 1 else torch.float32)

    def n_values(self, dtype: torch.dtype, *, keep: Collection[str] = ()) -> int:
        """How many numbers of ``dtype`` take the memory that ``items`` will."""
        kept = {name for name, info in self.tensors.items() if info.kind in keep and len(info.shape) == 2}
        plain = sum(math.prod(info.shape) for name, info in self.tensors.items() if name not in kept)
        return plain + sum(self.tensors[name].nbytes for name in kept) // dtype.itemsize

    def stored(self, name: str) -> StoredRows:
        """One packed matrix, its blocks copied byte for byte."""
        info = self.tensors[name]
        copy = np.frombuffer(self._map, np.uint8, info.nbytes, info.start).copy()  # on one thread
        return StoredRows(info.kind, torch.from_numpy(copy).view(info.shape[0], -1), info.shape[1])


class _Header:
    """Walks over the header with every step checked against the file's end."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data, self.name, self.size, self.at, self.n_items = data, name, len(data), 0, 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        magic = self.take(4, "the magic number")
        if magic == MAGIC[::-1]:
            raise self.error("is a big-endian GGUF file; labkit reads little-endian ones")
        if magic != MAGIC:
            raise self.error(f"is not a GGUF file (it starts with {magic!r})")
        version = self.scalar(4, "the version")
        if version not in VERSIONS:
            raise self.error(f"has GGUF version {version}; labkit reads {' and '.join(map(str, VERSIONS))}")
        n_tensors, n_keys = self.scalar(10, "the tensor count"), self.scalar(10, "the metadata count")
        self.fits(n_keys, 13, "metadata keys")  # an 8-byte length, a 4-byte type, a byte of value
        self.fits(n_tensors, 24, "tensors")
        if n_keys > MAX_KEYS or n_tensors > MAX_TENSORS:
            raise self.error(
                f"claims {n_keys} metadata keys and {n_tensors} tensors; at most {MAX_KEYS} and {MAX_TENSORS} are read"
            )
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self.string("a metadata key")
            if key in metadata:
                raise self.error(f"names the metadata key {key!r} twice")
            metadata[key] = self.value(self.scalar(4, f"the type of {key}"), key)
        entries = [self.tensor_entry() for _ in range(n_tensors)]
        return metadata, self.placed(entries, metadata.get("general.alignment", 32))

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string("a tensor name")
        n_dims = self.scalar(4, f"the dimensions of {name}")
        if not 1 <= n_dims <= MAX_DIMENSIONS:
            raise self.error(f"gives tensor {name!r} {n_dims} dimensions; 1 to {MAX_DIMENSIONS} are possible")
        dims = struct.unpack(f"<{n_dims}Q", self.take(8 * n_dims, f"the shape of {name}"))
        return name, dims[::-1], self.scalar(4, f"the type of {name}"), self.scalar(10, f"the offset of {name}")

    def placed(self, entries: list[tuple[str, tuple[int, ...], int, int]], alignment: Any) -> dict[str, TensorInfo]:
        """Turn offsets into places, checked: inside the file, aligned, and no two overlapping."""
        if not isinstance(alignment, int) or not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise self.error(f"states an alignment of {alignment!r}, which is not a power of two from 8 on")
        start_of_data = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, code, offset in entries:
            kind, block, block_nbytes = block_layout(code)
            if not kind:
                raise self.error(f"stores tensor {name!r} in a format (number {code}) that labkit does not know")
            n_values = 1
            for width in shape:
                n_values *= width
            if n_values == 0 or shape[-1] % block:
                raise self.error(f"gives tensor {name!r} the shape {shape}, which {kind} blocks of {block} cannot fill")
            nbytes = n_values // block * block_nbytes
            start = start_of_data + offset
            if offset % alignment or start + nbytes > self.size:
                raise self.error(
                    f"is truncated or corrupted: tensor {name!r} of {nbytes} bytes should start at byte {start}, "
                    f"but the file ends at {self.size}"
                )
            if name in tensors:
                raise self.error(f"holds tensor {name!r} twice")
            tensors[name] = TensorInfo(name, shape, kind, start, nbytes)
        end, last = start_of_data, ""
        for info in sorted(tensors.values(), key=lambda info: info.start):
            if info.start < end:
                raise self.error(f"is corrupted: tensors {last!r} and {info.name!r} overlap")
            end, last = info.start + info.nbytes, info.name
        return tensors

    def value(self, code: int, key: str, depth: int = 0) -> Any:
        """One metadata value: a scalar, a string, or a list of either."""
        if code == _STRING:
            return self.string(key)
        if code in _SCALARS:
            return self.scalar(code, key)
        if code != _ARRAY or depth == MAX_NESTING:
            raise self.error(f"gives metadata {key!r} a value of type {code}, which is not known")
        item, n_items = self.scalar(4, key), self.scalar(10, key)
        self.fits(n_items, 8 if item == _STRING else _WIDTHS.get(item, 12), f"entries of {key}")
        self.n_items += n_items
        if self.n_items > MAX_ITEMS:
            raise self.error(f"gives metadata up to {key!r} {self.n_items} entries; at most {MAX_ITEMS} are accepted")
        if item == _STRING:
            return self.strings(n_items, key)
        if item in _SCALARS:
            raw = self.take(n_items * _WIDTHS[item], key)
            if n_items <= PLAIN_ITEMS or item == _BOOL or sys.byteorder == "big":
                return list(struct.unpack(f"<{n_items}{_SCALARS[item]}", raw))
            return array(_SCALARS[item], raw)
        return [self.value(item, key, depth + 1) for _ in range(n_items)]

    def strings(self, n_items: int, key: str) -> list[str]:
        """A vocabulary is 50,000 of these: one tight loop."""
        data, size, at, length_of = self.data, self.size, self.at, _UINT64.unpack_from
        found = []
        try:
            for _ in range(n_items):
                start = at + 8
                at = start + length_of(data, at)[0]
                if at > size:
                    raise self.ends_early(key)
                found.append(str(data[start:at], "utf-8"))
        except (struct.error, UnicodeDecodeError):
            raise self.error(f"is corrupted: entry {len(found)} of {key} is not text") from None
        self.at = at
        return found

    def string(self, what: str) -> str:
        length = self.scalar(10, what)
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError:
            raise self.error(f"is corrupted: {what} is not text") from None

    def scalar(self, code: int, what: str) -> Any:
        return struct.unpack("<" + _SCALARS[code], self.take(_WIDTHS[code], what))[0]

    def take(self, n_bytes: int, what: str) -> bytes:
        if n_bytes > self.size - self.at:
            raise self.ends_early(what)
        start, self.at = self.at, self.at + n_bytes
        return self.data[start : self.at]

    def fits(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self.size - self.at:
            raise self.error(
                f"is truncated or corrupted: it claims {count} {what}, more than its {self.size} bytes hold"
            )

    def ends_early(self, what: str) -> ValueError:
        return self.error(f"is truncated or corrupted: it ends inside {what}")

    def error(self, what: str) -> ValueError:
        return ValueError(f"{self.name} {what}. Fetch or copy the file again.")
