"""``labkit.load``: from a name to a model that runs."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from labkit import backends, registry
from labkit.checkpoint.assemble import assemble
from labkit.checkpoint.catalogue import DEFAULT, RANDOM, catalogue, models
from labkit.checkpoint.fetch import fetch_default
from labkit.checkpoint.gguf import GGUFFile
from labkit.checkpoint.hub import fetch_from_hub, is_hub_id
from labkit.checkpoint.names import Named
from labkit.checkpoint.placement import choose_device, choose_dtype
from labkit.checkpoint.random_weights import byte_vocabulary, random_transformer
from labkit.checkpoint.safetensors import PICKLED, read_json, read_tensors, tensor_shapes, weight_files
from labkit.checkpoint.translate import config_from_gguf, config_from_hf, tensors_from_gguf, tensors_from_hf
from labkit.model import Model
from labkit.model.config import ModelConfig
from labkit.model.transformer import Transformer

Loaded = tuple[Transformer, Any]


def load(
    name: str | Path = DEFAULT,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    weights: Any = None,
    backend: Any = "auto",
) -> Model:
    """A model that runs, by name.

    name      a registered name (``labkit.models()``), ``random:SHAPE``, a Hugging Face id, a folder with
              config.json and safetensors, or a ``.gguf`` or ``.safetensors`` file
    device    auto (CUDA when there is one), cpu, cuda, cuda:1, mps
    dtype     auto (bf16 where the hardware has it), fp32, bf16, fp16
    weights   None keeps them in ``dtype``; else the name or config of a quantised form
    backend   which kernels; auto picks by device

    Raises ValueError that lists the choices for an unknown name, device, dtype or component, and that names what
    is wrong with a damaged file; FileNotFoundError, ConnectionError and OSError for files, network and disk.
    """
    place = choose_device(device)
    kind = choose_dtype(dtype, place)
    chosen = None
    if weights is not None:
        import labkit.quant  # noqa: F401 (registers the quantised forms)

        chosen = registry.find("weights", weights)
    if not (isinstance(backend, str) and backend == "auto"):
        registry.find("backend", backend)
    backends.start(backend, place)
    (transformer, tokenizer), source = _resolve(str(name), place, kind)
    if chosen is not None:
        component, config = chosen
        transformer = component.build(config, transformer=transformer)
    backends.warm_up(backend, transformer)  # what the first run would otherwise be timed at
    tokenizer.fit(transformer.config.vocab_size)
    tokenizer.settle()
    held = None if chosen is None else chosen[0].name
    return Model(transformer, tokenizer, name=str(name), weights=held, backend=backend, source=source)


def _resolve(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Loaded, str]:
    table = catalogue()
    if name == DEFAULT:
        path = fetch_default()
        return _from_gguf(path, device, dtype), str(path)
    if name.startswith(RANDOM) and name.removeprefix(RANDOM) in table["random"]:
        return _from_shape(name, table["random"][name.removeprefix(RANDOM)], device, dtype), name
    if name in table["hub"]:
        return _from_folder(fetch_from_hub(table["hub"][name]["id"]), device, dtype), table["hub"][name]["id"]
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _from_folder(path, device, dtype), str(path)
    if path.suffix in (".gguf", ".safetensors"):
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}.")
        read = _from_gguf if path.suffix == ".gguf" else _from_safetensors_file
        return read(path, device, dtype), str(path)
    if path.suffix in PICKLED:
        raise ValueError(f"{path.name} is a pickle, which can run code when opened: labkit never opens one.")
    if is_hub_id(name):
        return _from_folder(fetch_from_hub(name), device, dtype), name
    raise ValueError(_unknown(name))


def _unknown(name: str) -> str:
    known = models()

    def likeness(other: str) -> float:
        """How much of ``other``, of its beginning, or of what follows ``random:`` was typed."""
        forms = {other, other[: len(name)], other.removeprefix(RANDOM), other.removeprefix(RANDOM)[: len(name)]}
        return max(difflib.SequenceMatcher(None, name, form).ratio() for form in forms)

    close = [other for other in sorted(known, key=likeness, reverse=True)[:3] if name and likeness(other) > 0.7]
    meant = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return (
        f"unknown model {name!r}.{meant} Choose a name ({', '.join(known)}), a Hugging Face id (owner/model), "
        "a folder, or a .gguf or .safetensors file."
    )


def _from_gguf(path: Path, device: torch.device, dtype: torch.dtype) -> Loaded:
    from labkit.tokenizer import Tokenizer

    with GGUFFile(path) as file:
        shapes = {name: info.shape for name, info in file.tensors.items()}
        config = config_from_gguf(file.metadata, shapes, file.tensor)
        _check_tensor_count(config, len(shapes), path.name)
        tensors = tensors_from_gguf(config, file.items(dtype))
        transformer = assemble(config, tensors, device=device, dtype=dtype, name=path.name, n_stored=_n_values(shapes))
        return transformer, Tokenizer.from_gguf(file.metadata)


def _from_folder(folder: Path, device: torch.device, dtype: torch.dtype) -> Loaded:
    if not (folder / "config.json").is_file():
        files = sorted(folder.glob("*.gguf"))
        if len(files) == 1:
            return _from_gguf(files[0], device, dtype)
        if files:
            raise ValueError(
                f"{folder} holds {len(files)} GGUF files; name one: {', '.join(f.name for f in files[:8])}."
            )
    return _from_safetensors(folder, weight_files, device, dtype)


def _from_safetensors_file(path: Path, device: torch.device, dtype: torch.dtype) -> Loaded:
    return _from_safetensors(path.parent, lambda _: [path], device, dtype)


def _from_safetensors(folder: Path, files_of: Any, device: torch.device, dtype: torch.dtype) -> Loaded:
    settings = read_json(folder / "config.json")
    if settings.get("quantization_config"):
        method = settings["quantization_config"]
        method = method.get("quant_method") if isinstance(method, dict) else method
        raise ValueError(f"{folder} holds packed weights ({method}), which this labkit does not read.")
    config = config_from_hf(settings)
    files = files_of(folder)
    shapes = tensor_shapes(files)
    _check_tensor_count(config, len(shapes), folder.name)
    tensors: Iterator[Named] = tensors_from_hf(config, read_tensors(files))
    transformer = assemble(
        config, tensors, device=device, dtype=dtype, name=folder.name, n_stored=_n_values(shapes), borrowed=True
    )
    return transformer, _tokenizer_in(folder)


def _tokenizer_in(folder: Path) -> Any:
    from labkit.tokenizer import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no tokenizer.json. Models with another tokenizer file can be converted once with "
            "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
        )
    return Tokenizer.from_file(path)


def _from_shape(name: str, settings: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Loaded:
    from labkit.tokenizer import Tokenizer

    config = config_from_hf(settings)
    transformer = random_transformer(config, device=device, dtype=dtype, name=name)
    return transformer, Tokenizer.from_gguf(byte_vocabulary(config.vocab_size))


def _n_values(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _check_tensor_count(config: ModelConfig, n_tensors: int, name: str) -> None:
    """Before thousands of layers are built for a file that holds a dozen tensors."""
    if config.n_layers * 4 > n_tensors:
        raise ValueError(
            f"{name}: the config and the weights disagree. {config.n_layers} layers cannot be made of "
            f"{n_tensors} tensors: some are missing."
        )
