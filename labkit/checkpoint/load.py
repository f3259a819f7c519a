"""``labkit.load``: from a name to a model that runs."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from labkit import backends, registry
from labkit.checkpoint import heads, packed
from labkit.checkpoint.assemble import assemble
from labkit.checkpoint.catalogue import DEFAULT, RANDOM, catalogue, models
from labkit.checkpoint.fetch import fetch_default
from labkit.checkpoint.gguf import TensorInfo
from labkit.checkpoint.gguf_parts import only_model, open_gguf
from labkit.checkpoint.hub import fetch_from_hub, is_hub_id
from labkit.checkpoint.notes import note
from labkit.checkpoint.placement import choose_device, choose_dtype
from labkit.checkpoint.random_weights import byte_vocabulary, random_transformer
from labkit.checkpoint.safetensors import PICKLED, read_json, read_tensors, tensor_shapes, weight_files
from labkit.checkpoint.stored_rows import held_format
from labkit.checkpoint.translate import config_from_gguf, config_from_hf, tensors_from_gguf, tensors_from_hf
from labkit.model import Model
from labkit.model.config import ModelConfig, dtype_name
from labkit.model.transformer import Transformer
from labkit.quant import WeightFormat, block_groups
from labkit.quant.blocks import FORMATS
from labkit.quant.calibrated import Calibrated
from labkit.quant.format import replace_head

MAX_NAME_CHARS = 1024
Loaded = tuple[Any, Any]
"""A transformer (None where nobody asked for it) and a tokenizer."""
DEFAULT_WEIGHTS = "stored"
"""What ``weights=None`` means where the backend computes from it; elsewhere a GGUF file is unpacked."""


class Target(NamedTuple):
    """Where a model goes."""

    device: torch.device
    dtype: torch.dtype
    keep: bool
    """Whether ggml's blocks stay as they are."""
    keep_groups: bool = False
    """Whether the matrices of a GPTQ, AWQ or compressed-tensors file stay packed."""
    backend: backends.Backend | None = None
    """Nobody has chosen how weights are held: what this one has no product of is unpacked, which is said."""
    weights: bool = True
    """False: only the tokenizer is wanted."""


def load(
    name: str | Path = DEFAULT,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    weights: Any = None,
    backend: Any = "auto",
    progress: Callable[[float, str], Any] | None = None,
) -> Model:
    """A model that runs, by name.

    name      a registered name (``labkit.models()``), ``random:SHAPE``, a Hugging Face id, a folder with
              config.json and safetensors, or a ``.gguf`` or ``.safetensors`` file
    device    auto (CUDA when there is one), cpu, cuda, cuda:1, mps
    dtype     auto (bf16 where the hardware has it), fp32, bf16, fp16
    weights   "stored" keeps what the file packs as it is, "plain" unpacks it into ``dtype``; None is "stored" where
              the backend computes from a GGUF file's blocks (``fused``: on a CPU, in fp32 and bf16; ``cuda-graph``)
              and says where it is not; else the name or config of a format (``labkit.components("weights")``)
    backend   which kernels; auto picks by device
    progress  is told ``(share, words)`` of a calibration ("gptq-int4", "awq-int4": minutes, once); what it raises
              cancels. None prints a line now and then

    Raises ValueError that lists the choices for an unknown name, device, dtype or component, and that names what
    is wrong with a damaged file; FileNotFoundError, ConnectionError and OSError for files, network and disk.
    """
    place = choose_device(device)
    kind = choose_dtype(dtype, place)
    chosen = registry.find("weights", DEFAULT_WEIGHTS if weights is None else weights)
    if not (isinstance(backend, str) and backend == "auto"):
        registry.find("backend", backend)
    backends.start(backend, place)
    component, config = chosen
    keep = getattr(config, "from_file", False)
    settles = backends.find(backend, place) if weights is None else None
    target = Target(place, kind, keep=keep, keep_groups=keep, backend=settles)
    if isinstance(config, Calibrated):
        (transformer, tokenizer), source = _calibrated(str(name), config, target, progress)
    else:
        (transformer, tokenizer), source = _resolve(str(name), target)
    if target.keep_groups:
        held = held_format(transformer)  # the file decides
    elif isinstance(config, Calibrated):
        held = config
    elif isinstance(config, WeightFormat):
        transformer, held = component.build(config, transformer=transformer), config
    else:
        held = None
    backends.warm_up(backend, transformer)  # what the first run would otherwise be timed at
    tokenizer.fit(transformer.config.vocab_size)
    tokenizer.prepare_chat()
    held = held and registry.named("weights", held)
    return Model(transformer, tokenizer, name=str(name), weights=held, backend=backend, source=source)


def _calibrated(name: str, config: Calibrated, target: Target, progress: Any) -> tuple[Loaded, str]:
    """The model with its integers chosen by a text: from the cache folder, after a calibration when it is not there."""
    from labkit.checkpoint import quantized

    (_, tokenizer), source = _resolve(name, target._replace(weights=False))
    shape = catalogue()["random"].get(name.removeprefix(RANDOM)) if name.startswith(RANDOM) else None
    folder = quantized.folder_of(source, config)
    if not quantized.is_there(folder):
        plain = Target(torch.device("cpu"), torch.float32, keep=False)
        (transformer, _), _ = _resolve(name, plain)
        at = Path(source) if Path(source).exists() or shape else fetch_from_hub(source)
        settings = quantized.settings_of(at) if shape is None else shape
        quantized.make(
            folder, config, transformer=transformer, tokenizer=tokenizer, settings=settings, progress=progress
        )
        del transformer
    transformer = _transformer_in(folder, weight_files, target._replace(keep_groups=True))
    return (replace_head(transformer, config.top), tokenizer), source


def _resolve(name: str, target: Target) -> tuple[Loaded, str]:
    table = catalogue()
    if name == DEFAULT:
        path = fetch_default()
        return _from_gguf(path, target), str(path)
    if name.startswith(RANDOM) and name.removeprefix(RANDOM) in table["random"]:
        return _from_shape(name, table["random"][name.removeprefix(RANDOM)], target), name
    if name in table["hub"]:
        return _from_folder(fetch_from_hub(table["hub"][name]["id"]), target), table["hub"][name]["id"]
    if len(name) > MAX_NAME_CHARS or "\0" in name:
        raise ValueError(f"a model's name has {len(name)} characters, or one that no file has: {name[:40]!r}...")
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _from_folder(path, target), str(path)
    if path.suffix in (".gguf", ".safetensors"):
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}.")
        read = _from_gguf if path.suffix == ".gguf" else _from_safetensors_file
        return read(path, target), str(path)
    if path.suffix in PICKLED:
        raise ValueError(f"{path.name} is a pickle, which can run code when opened: labkit never opens one.")
    if is_hub_id(name):
        return _from_folder(fetch_from_hub(name), target), name
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


def _from_gguf(path: Path, target: Target) -> Loaded:
    from labkit.tokenizer import Tokenizer

    with open_gguf(path) as file:
        if not target.weights:
            return None, Tokenizer.from_gguf(file.metadata)
        shapes = {name: info.shape for name, info in file.tensors.items()}
        config = config_from_gguf(file.metadata, shapes, file.tensor)
        _check_tensor_count(config, len(shapes), path.name)
        kept, why_not = _kept(config, target)
        tensors = tensors_from_gguf(config, file.items(target.dtype, keep=kept))
        n_stored = file.n_values(target.dtype, keep=kept)
        if target.backend is not None:
            unpacked = [info for info in file.tensors.values() if info.kind not in kept or len(info.shape) > 2]
            _say_unpacked(path.name, unpacked, target.dtype, why_not)
        transformer = assemble(
            config, tensors, device=target.device, dtype=target.dtype, name=path.name, n_stored=n_stored
        )
        return transformer, Tokenizer.from_gguf(file.metadata)


def _kept(config: ModelConfig, target: Target) -> tuple[Collection[str], str]:
    """The formats that stay packed, and why the others do not."""
    if not target.keep:
        return (), ""
    if target.backend is None:  # asked for: whoever computes
        return FORMATS, ""
    if reason := target.backend.why_unpack(config, device=target.device, dtype=target.dtype):
        return (), reason
    return [kind for kind in FORMATS if block_groups.has(kind)], "no backend has a product of them"


def _say_unpacked(name: str, tensors: Iterable[TensorInfo], dtype: torch.dtype, reason: str) -> None:
    """What packed matrices became, why, and how to have them otherwise."""
    found = [info for info in tensors if info.kind in FORMATS and len(info.shape) > 1]
    if not found:
        return
    kinds = ", ".join(sorted({info.kind for info in found}))
    n_bytes, n_values = sum(info.nbytes for info in found), sum(math.prod(info.shape) for info in found)
    note(
        f"{name} packs matrices as {kinds} ({n_bytes / 1e6:,.0f} MB); they are unpacked into {dtype_name(dtype)} "
        f"({n_values * dtype.itemsize / 1e6:,.0f} MB), the same values: {reason}. weights='plain' asks for that, "
        "weights='stored' keeps them packed, and plain PyTorch unpacks them for each step."
    )


def _from_folder(folder: Path, target: Target) -> Loaded:
    if not (folder / "config.json").is_file():
        files = sorted(folder.glob("*.gguf"))
        if (model := only_model(files)) is not None:
            return _from_gguf(model, target)
        if files:
            raise ValueError(
                f"{folder} holds {len(files)} GGUF files; name one: {', '.join(f.name for f in files[:8])}."
            )
    return _from_safetensors(folder, weight_files, target)


def _from_safetensors_file(path: Path, target: Target) -> Loaded:
    return _from_safetensors(path.parent, lambda _: [path], target)


def _from_safetensors(folder: Path, files_of: Any, target: Target) -> Loaded:
    transformer = _transformer_in(folder, files_of, target) if target.weights else None
    return transformer, _tokenizer_in(folder)


def _transformer_in(folder: Path, files_of: Any, target: Target) -> Transformer:
    settings = read_json(folder / "config.json")
    packs = settings.get("quantization_config")
    layout = packed.layout_of(packs, folder.name) if packs else None
    config = config_from_hf(settings)
    files = files_of(folder)
    shapes = tensor_shapes(files)
    config = heads.settled(config, shapes, files)
    _check_tensor_count(config, len(shapes), folder.name)
    tensors: Iterator[Any] = read_tensors(files)
    if layout is not None:
        tensors = packed.gathered(layout, list(shapes), tensors, keep=target.keep_groups)
    return assemble(
        config,
        tensors_from_hf(config, tensors),
        device=target.device,
        dtype=target.dtype,
        name=folder.name,
        n_stored=_n_values(shapes),
        borrowed=True,
    )


def _tokenizer_in(folder: Path) -> Any:
    from labkit.tokenizer import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no tokenizer.json. Models with another tokenizer file can be converted once with "
            "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
        )
    return Tokenizer.from_file(path)


def _from_shape(name: str, settings: dict[str, Any], target: Target) -> Loaded:
    from labkit.tokenizer import Tokenizer

    config = config_from_hf(settings)
    if not target.weights:
        return None, Tokenizer.from_gguf(byte_vocabulary(config.vocab_size))
    transformer = random_transformer(config, device=target.device, dtype=target.dtype, name=name)
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
