"""A cache of every kind that a CPU has, small enough for groups to fill and rings to turn within a test."""

from __future__ import annotations

import torch

from labkit import registry

CACHES = {
    "none": {},
    "contiguous": {},
    "paged": {"block_size": 8},
    "paged int8": {"block_size": 16, "dtype": "int8"},
    "int8": {"group": 16, "recent": 0},
    "int4": {"group": 16, "recent": 32},
    "sliding": {"window": 16, "n_sinks": 3},
    "sliding, layers' own": {"window": 0},
}
CAPACITY = 150


def kind_of(name):
    return name.split(",")[0].split(" ")[0]


def build_cache(name, transformer, dtype=torch.float32, n_sequences=1):
    component = registry.find("kv_cache", kind_of(name))[0]
    config = component.config(**CACHES[name]) if component.config else None
    sizes = {"capacity_tokens": CAPACITY, "device": "cpu", "dtype": dtype, "n_sequences": n_sequences}
    return component.build(config, layers=transformer.cache_entries, **sizes)
