"""Read a folder of safetensors, whole or in shards. Pickled weights (.bin, .pt) are never opened: they run code."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.checkpoint.names import Named
from labkit.checkpoint.notes import note
from labkit.resources import read_json_object

INDEX = "model.safetensors.index.json"
MAX_JSON_BYTES = 64 * 2**20
MAX_HEADER_BYTES, MAX_TENSORS = 32 * 2**20, 2**17
"""Of one safetensors file; published ones have some megabytes for some ten thousand."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises FileNotFoundError, or ValueError when it is damaged or something else."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: a model folder needs its {path.name}.")
    return read_json_object(path, max_bytes=MAX_JSON_BYTES)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in order: those that transformers takes, with a note where it chooses.

    ``model.safetensors`` comes before shards, and shards are those that the index names. Raises ValueError when a shard
    is missing, or when the folder has pickled weights only.
    """
    found = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith(("consolidated", "adapter_")))
    for path in found:
        if not path.is_file():
            raise ValueError(f"{path} is not a regular file: weights are read from files only.")
    single, index = folder / "model.safetensors", folder / INDEX
    if single in found:
        taken = [single]
    elif index.is_file():
        taken = _indexed(folder, index)
    else:
        taken = found
    if beside := [path.name for path in found if path not in taken]:
        note(
            f"{folder} holds weights twice: {', '.join(path.name for path in taken[:3])} is read, as transformers "
            f"does, and not {', '.join(beside[:6])}{', ...' if len(beside) > 6 else ''}."
        )
    elif single in found and index.is_file():
        note(f"{folder}: {INDEX} is left over from shards that are not there; {single.name} is read.")
    if taken:
        return taken
    if any(path.suffix in PICKLED for path in folder.iterdir()):
        raise ValueError(
            f"{folder} has pickled weights only (.bin, .pt), which can run code when opened: labkit never opens them. "
            "Look for a safetensors version, or convert them in a sandbox."
        )
    raise FileNotFoundError(f"{folder} holds no .safetensors file.")


def _indexed(folder: Path, index: Path) -> list[Path]:
    """The shards that an index names."""
    table = read_json(index).get("weight_map")
    names = sorted(set(table.values())) if isinstance(table, dict) and all(map(_is_plain_name, table.values())) else []
    if not names:
        raise ValueError(f"{index} has no usable weight_map (tensor name to file name).")
    lacking = [name for name in names if not (folder / name).is_file()]
    if lacking:
        others = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in names)
        stale = f" The folder has {', '.join(others[:6])}, which it does not name: is it stale?" if others else ""
        raise ValueError(
            f"{folder} lacks {len(lacking)} of the {len(names)} shards that {INDEX} names: "
            f"{', '.join(lacking[:6])}.{stale}"
        )
    return [folder / name for name in names]


def _is_plain_name(value: Any) -> bool:
    return (
        isinstance(value, str)
        and len(value) < 256
        and value.endswith(".safetensors")
        and "/" not in value
        and "\\" not in value
    )


def read_tensors(files: list[Path]) -> Iterator[Named]:
    """Every tensor of the files, one at a time, mapped: it is valid until the next one is asked for.

    Raises ValueError, naming the file, when one is truncated or corrupted.
    """
    from safetensors import SafetensorError, safe_open

    for path in files:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    tensor = file.get_tensor(name)
                    yield name, tensor
        except (SafetensorError, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path.name} is truncated or corrupted ({error}). Fetch or copy it again.") from error


def read_one(files: list[Path], name: str) -> Any:
    """One tensor, copied, out of whichever file holds it."""
    from safetensors import SafetensorError, safe_open

    for path in files:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                if name in file.keys():  # noqa: SIM118 (not a dict)
                    return file.get_tensor(name).clone()
        except (SafetensorError, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path.name} is truncated or corrupted ({error}). Fetch or copy it again.") from error
    raise KeyError(name)


def tensor_shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape, from the headers alone."""
    from safetensors import SafetensorError, safe_open

    shapes = {}
    for path in files:
        _check_header(path)
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path.name} is truncated or corrupted ({error}). Fetch or copy it again.") from error
    return shapes


def _check_header(path: Path) -> None:
    """Raise ValueError for a header that would take far more memory than its bytes."""
    with open(path, "rb") as file:
        size = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))[0]
        n_entries = file.read(min(size, MAX_HEADER_BYTES)).count(b'"dtype"')
    if size > MAX_HEADER_BYTES or n_entries > MAX_TENSORS:
        raise ValueError(
            f"{path.name} has a header of {size:,} bytes with {n_entries:,} tensors or more; at most "
            f"{MAX_HEADER_BYTES:,} and {MAX_TENSORS:,} are read. It is damaged or hostile."
        )
