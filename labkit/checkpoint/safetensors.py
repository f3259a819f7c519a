"""Read a folder of safetensors, whole or in shards. Pickled weights (.bin, .pt) are never opened: they run code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.checkpoint.names import Named

INDEX = "model.safetensors.index.json"
MAX_JSON_BYTES = 64 * 2**20
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises FileNotFoundError, or ValueError when it is damaged or something else."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: a model folder needs its {path.name}.")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes: too large for a {path.name}.")
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # bad UTF-8 is a ValueError too
        raise ValueError(f"{path} is not valid JSON ({error}). Fetch or copy it again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in order.

    Raises ValueError when a shard is missing, or when the folder has pickled weights only.
    """
    index = folder / INDEX
    if index.is_file():
        table = read_json(index).get("weight_map")
        names = (
            sorted(set(table.values())) if isinstance(table, dict) and all(map(_is_plain_name, table.values())) else []
        )
        if not names:
            raise ValueError(f"{index} has no usable weight_map (tensor name to file name).")
        lacking = [name for name in names if not (folder / name).is_file()]
        if lacking:
            raise ValueError(f"{folder} lacks {len(lacking)} of {len(names)} shards: {', '.join(lacking[:6])}.")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if files:
        return files
    if any(path.suffix in PICKLED for path in folder.iterdir()):
        raise ValueError(
            f"{folder} has pickled weights only (.bin, .pt), which can run code when opened: labkit never opens them. "
            "Look for a safetensors version, or convert them in a sandbox."
        )
    raise FileNotFoundError(f"{folder} holds no .safetensors file.")


def _is_plain_name(value: Any) -> bool:
    return isinstance(value, str) and value.endswith(".safetensors") and "/" not in value and "\\" not in value


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


def tensor_shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape, from the headers alone."""
    from safetensors import SafetensorError, safe_open

    shapes = {}
    for path in files:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path.name} is truncated or corrupted ({error}). Fetch or copy it again.") from error
    return shapes
