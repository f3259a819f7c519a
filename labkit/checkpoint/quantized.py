"""Models that were calibrated, kept in the cache folder so that nobody calibrates twice.

A folder a model and setting, in the layout of ``save_packed``. Its name ends with a hash of everything that the result
depends on: the file that was quantised, the format's options, the calibration text, and the method's version. It is
written beside its place and moved there whole: a cancelled or failed calibration leaves nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from labkit import registry
from labkit.checkpoint import calibrate, save_packed
from labkit.checkpoint.cache import check_free_space, exclusive, scratch
from labkit.quant.calibrated import Calibrated
from labkit.quant.format import format_of
from labkit.resources import cache_folder

VERSION = 1
"""Of the methods: a change in what they choose makes new folders."""


def folder_of(source: str, config: Calibrated) -> Path:
    """Where the result of ``config`` on the model at ``source`` (a path, or a name that says it all) lies."""
    path = Path(source)
    files = [*sorted(path.glob("*.safetensors")), path / "config.json"] if path.is_dir() else [path]
    stamps = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()] or [source]
    text = calibrate.calibration_text() if config.text is None else config.text
    said = repr((VERSION, config, stamps, hashlib.sha256(text.encode()).hexdigest()))
    label = registry.label("weights", config).replace(", ", "-").replace("=", "-")
    return cache_folder() / "quantized" / f"{path.stem[:48]}-{label}-{hashlib.sha256(said.encode()).hexdigest()[:12]}"


def is_there(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def needs_calibration(source: str, weights: Any) -> bool:
    """Whether loading ``weights`` would take a calibration first: it is such a format, and not kept from before."""
    config = None if weights is None else format_of(weights)
    return isinstance(config, Calibrated) and not is_there(folder_of(source, config))


def make(
    folder: Path,
    config: Calibrated,
    *,
    transformer: Any,
    tokenizer: Any,
    settings: dict[str, Any],
    progress: calibrate.Progress | None = None,
) -> None:
    """Calibrate ``transformer`` (float32, on the CPU; it is used up) and write ``folder``.

    Whatever ``progress`` raises cancels. Raises ValueError when the text is too short, a group does not divide a
    layer's inputs or an activation is not finite, before anything is written; OSError when the disk is full."""
    windows = calibrate.windows_of(tokenizer, config, transformer.config)
    for _, linear in calibrate.linears_of(transformer.layers):
        config.layer_nbytes(linear.out_features, linear.in_features)  # says which groups would divide
    with exclusive(folder.parent):
        if is_there(folder):
            return  # another process was at it
        check_free_space(folder.parent, 2 * sum(p.numel() for p in transformer.parameters()))
        calibrate.walk(transformer, config, windows, progress=progress or printed())
        with scratch(folder.parent) as workshop:
            made = workshop / "model"
            made.mkdir()
            save_packed.save(made, transformer, settings, registry.label("weights", config))
            os.replace(made, folder)


def printed() -> Callable[[float, str], None]:
    """Progress for a terminal: the forecast, then every tenth of the way."""
    import sys

    said = -1.0

    def say(share: float, words: str) -> None:
        nonlocal said
        if share == 0.0 or share - said >= 0.1:
            said = share
            print(words, file=sys.stderr)

    return say


def settings_of(path: Path) -> dict[str, Any]:
    """The config.json of a model's file or folder, in transformers' words."""
    from labkit.checkpoint.gguf_names import settings_from_gguf
    from labkit.checkpoint.gguf_parts import only_model, open_gguf
    from labkit.checkpoint.safetensors import read_json

    if path.is_dir() and not (path / "config.json").is_file():
        path = only_model(sorted(path.glob("*.gguf"))) or path
    if path.suffix != ".gguf":
        return read_json((path if path.is_dir() else path.parent) / "config.json")
    with open_gguf(path) as file:
        shapes = {name: info.shape for name, info in file.tensors.items()}
        found = settings_from_gguf(file.metadata, shapes, lambda name: file.tensor(name, torch.float32))
        return {key: value for key, value in found.items() if value is not None}
