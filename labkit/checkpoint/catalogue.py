"""The models that ``labkit.load`` knows by name, from ``data/models.toml``; each is a component of kind "model"."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any

from labkit.checkpoint.translate import config_from_hf
from labkit.model.config import ModelConfig
from labkit.registry import register
from labkit.resources import data_path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT = "smollm2-135m-instruct"
RANDOM = "random:"


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """``{"hub": {name: {"id": ...}}, "random": {name: config.json's own words}, "shape": as "random"}``."""
    return tomllib.loads(data_path("models.toml").read_text("utf-8"))


def models() -> list[str]:
    """What ``load`` knows by name: the default, models of the hub, and ``random:`` shapes.

    >>> models()[0]
    'smollm2-135m-instruct'
    """
    table = catalogue()
    return [DEFAULT, *table["hub"], *(RANDOM + name for name in table["random"])]


def shape(name: str) -> ModelConfig:
    """The config of a model that is there to be counted with, not loaded. Raises ValueError that lists the names."""
    table = catalogue()["shape"]
    if name not in table:
        raise ValueError(f"no shape {name!r}: choose one of {', '.join(table)}.")
    return config_from_hf(table[name])


def _offline() -> str | None:
    offline = any(os.environ.get(name) for name in ("LABKIT_OFFLINE", "HF_HUB_OFFLINE"))
    return "it comes from the Hugging Face hub, and an environment variable says offline." if offline else None


def _register(name: str, summary: str, **options: Any) -> None:
    @register("model", name, summary=summary, **options)
    def build(config: None, **how: Any) -> Any:
        from labkit.checkpoint.load import load

        return load(name, **how)


_register(DEFAULT, "The default: 135 M parameters, 30 layers, GQA; fetched once, needs no hub")
for _name, _entry in catalogue()["hub"].items():
    _register(_name, f"From the Hugging Face hub: {_entry['id']}", why_not=_offline)
for _name in catalogue()["random"]:
    _register(RANDOM + _name, f"Random weights in the shape of {_name}: real speed and memory, no sense")
