"""A GGUF model in several files: opened by its first part, read as one.

llama.cpp's ``gguf-split`` gives each part ``split.no`` and ``split.count``, the first all other metadata, and names
them ``NAME-00001-of-00003.gguf``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from labkit.checkpoint.gguf import GGUFFile
from labkit.checkpoint.stored_rows import StoredRows

MAX_PARTS = 1024
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class GGUFParts:
    """Some open GGUF files as one: the first one's metadata, everybody's tensors."""

    def __init__(self, parts: list[GGUFFile]) -> None:
        self.metadata = parts[0].metadata
        self.tensors = {name: info for part in parts for name, info in part.tensors.items()}
        self._parts = parts
        if len(self.tensors) != (n := sum(len(part.tensors) for part in parts)):
            raise ValueError(f"{parts[0].path.name}: its parts hold {n - len(self.tensors)} tensors twice.")
        stated = self.metadata.get("split.tensors.count", n)
        if stated != n:
            raise ValueError(f"{parts[0].path.name}: its parts hold {n} tensors; the first part says {stated}.")

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """One tensor (``GGUFFile.tensor``)."""
        return next(part for part in self._parts if name in part.tensors).tensor(name, dtype)

    def items(
        self, dtype: torch.dtype = torch.float32, *, keep: Collection[str] = ()
    ) -> Iterator[tuple[str, torch.Tensor | StoredRows]]:
        """Every tensor, part by part (``GGUFFile.items``)."""
        for part in self._parts:
            yield from part.items(dtype, keep=keep)

    def n_values(self, dtype: torch.dtype, *, keep: Collection[str] = ()) -> int:
        """How many numbers of ``dtype`` take the memory that ``items`` will."""
        return sum(part.n_values(dtype, keep=keep) for part in self._parts)


@contextmanager
def open_gguf(path: Path) -> Iterator[GGUFFile | GGUFParts]:
    """The model in a GGUF file, or in the file and its other parts.

    Raises ValueError that names a missing part, or the first one when ``path`` is another.
    """
    with ExitStack() as stack:
        first = stack.enter_context(GGUFFile(path))
        n_parts = first.metadata.get("split.count", 0)
        if not isinstance(n_parts, int) or not 0 <= n_parts <= MAX_PARTS:
            raise ValueError(f"{path.name} says that it is one of {n_parts!r:.40} parts; at most {MAX_PARTS} are read.")
        if n_parts < 2:
            yield first
            return
        names = part_names(path, n_parts)
        if first.metadata.get("split.no") != 0:
            raise ValueError(f"{path.name} is part {first.metadata.get('split.no')} of {n_parts}: load {names[0]}.")
        lacking = [name for name in names if not (path.parent / name).is_file()]
        if lacking:
            raise ValueError(f"{path.name} is one of {n_parts} parts; missing beside it: {', '.join(lacking[:6])}.")
        parts = [first, *(stack.enter_context(GGUFFile(path.parent / name)) for name in names[1:])]
        for i, part in enumerate(parts):
            if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (i, n_parts):
                raise ValueError(f"{part.path.name} is not part {i + 1} of {n_parts}: it belongs to another model.")
        yield GGUFParts(parts)


def part_names(path: Path, n_parts: int) -> list[str]:
    """The names of all parts of a model, from one's."""
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) != n_parts:
        raise ValueError(
            f"{path.name} is one of {n_parts} parts, which are found by their names: NAME-00001-of-{n_parts:05d}.gguf "
            "and so on. Give them these names."
        )
    return [f"{match[1]}-{i:05d}-of-{n_parts:05d}.gguf" for i in range(1, n_parts + 1)]


def only_model(files: list[Path]) -> Path | None:
    """The file to open among a folder's: the only one, or the first part when all are parts of one model."""
    matches = [_PART.fullmatch(path.name) for path in files]
    if len(files) > 1 and len({(m[1], m[3]) if m else path for m, path in zip(matches, files, strict=True)}) > 1:
        return None
    return min(files, default=None)
