"""Tied or not: whether a model's head is its embedding, where the config and the weights disagree.

As transformers decides: a config that says tied and a file with one of the two tensors means that one; a file with two
that differ keeps both, whatever the config says.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from labkit.checkpoint.notes import note
from labkit.checkpoint.safetensors import read_one
from labkit.model.config import ModelConfig

_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")


def settled(config: ModelConfig, names: Collection[str], files: list[Path]) -> ModelConfig:
    """``config``, untied when the files store a head that is not the embedding (with a note that says so)."""
    head = next((name for name in names if name.endswith(_HEAD)), None)
    embedding = next((name for name in names if name.endswith(_EMBEDDINGS)), None)
    if not config.tied_embeddings or head is None or embedding is None:
        return config
    stored, tied = read_one(files, head), read_one(files, embedding)
    if stored.shape == tied.shape and torch.equal(stored, tied):
        return config
    note(
        f"the config ties the head to the embedding (tie_word_embeddings), but the file stores a head of its own "
        f"({head}) that differs: it is kept, as transformers does."
    )
    return replace(config, tied_embeddings=False)
