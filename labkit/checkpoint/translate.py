"""The only place that knows other projects' words: their configs and tensor names, in labkit's vocabulary.

``config_from_hf`` and ``tensors_from_hf`` read what transformers saves, ``config_from_gguf`` and
``tensors_from_gguf`` what llama.cpp's GGUF files hold. Each family stands in ``families``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.checkpoint.families import FAMILIES
from labkit.checkpoint.gguf_names import Read, settings_from_gguf, tensors_from_gguf
from labkit.checkpoint.names import tensors_from_hf
from labkit.checkpoint.settings import Settings
from labkit.model.config import ModelConfig
from labkit.resources import MALFORMED

__all__ = ["config_from_gguf", "config_from_hf", "supported", "tensors_from_gguf", "tensors_from_hf"]


def supported() -> list[str]:
    """Names of the families that labkit runs, as transformers spells ``model_type``."""
    return sorted(FAMILIES)


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """A transformers ``config.json`` as a ``ModelConfig``.

    Raises ValueError that lists the supported families when ``model_type`` is another one, and that names the
    key when a value is missing, of the wrong type or out of range.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"a model's config must be a JSON object, not {type(values).__name__}.")
    if values.get("model_type") == "gemma3" and isinstance(values.get("text_config"), Mapping):
        values = {**values["text_config"], "model_type": "gemma3_text"}
    name = values.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ValueError(
            f"architecture {name!r} is not supported. labkit runs {', '.join(supported())}: "
            "choose a model of one of these families (the model card names its architecture)."
        )
    settings = Settings(values, defaults=family.defaults)
    try:
        config = family.build(family.name, settings)
        settings.check_all_read(family.name)
    except MALFORMED as error:
        raise ValueError(f"config: {family.name} is malformed: {type(error).__name__}: {error}") from error
    return config


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], read: Read) -> ModelConfig:
    """GGUF metadata as a ``ModelConfig``.

    ``shapes`` of the stored tensors say what the metadata does not (a tied head, biases), and ``read`` gives
    the few small tensors that hold rotary factors. Raises as ``config_from_hf`` does.
    """
    try:
        values = settings_from_gguf(metadata, shapes, read)
    except MALFORMED as error:
        raise ValueError(f"the GGUF file's metadata is malformed: {type(error).__name__}: {error}") from error
    return config_from_hf(values)
