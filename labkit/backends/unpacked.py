"""A model with its file's own blocks as plain numbers, for the minute in which plain PyTorch serves in the compiled
step's place: it would unpack them for each token, which takes three times as long as the product itself."""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from labkit.quant import StoredLinear

MOST_VALUES = 300_000_000
"""Larger models stay packed: unpacked beside their blocks they might not fit."""
_made: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def unpacked(transformer: Any) -> Any:
    """The same model over the same norms; itself where nothing is stored in blocks, or too much. One for all who ask,
    until ``forget``."""
    found = transformer.named_modules(remove_duplicate=False)  # a tied head is the embedding's too
    stored = {name: m for name, m in found if isinstance(m, StoredLinear)}
    if not 0 < sum(m.out_features * m.in_features for m in set(stored.values())) <= MOST_VALUES:
        return transformer
    if transformer not in _made:
        other = apart(transformer)
        for name, linear in stored.items():
            if not name.startswith("embedding"):  # its rows are looked up one by one
                parent, _, leaf = name.rpartition(".")
                setattr(other.get_submodule(parent), leaf, _plain(linear, transformer.dtype))
        _made[transformer] = other
    return _made[transformer]


def forget(transformer: Any) -> None:
    """The compiled step serves from now on."""
    _made.pop(transformer, None)


def apart(module: Any) -> Any:
    """A module tree of its own over the same tensors: parts can be replaced in it."""
    other = copy.copy(module)
    other._modules = {name: None if m is None else apart(m) for name, m in module._modules.items()}
    return other


def _plain(linear: StoredLinear, dtype: Any) -> nn.Linear:
    made = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    made.weight = nn.Parameter(linear.dequantize().to(dtype), requires_grad=False)
    made.register_parameter("bias", linear.bias)
    return made
