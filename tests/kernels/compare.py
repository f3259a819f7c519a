"""A backend and its oracle, run side by side."""

from __future__ import annotations

import copy

import torch

from labkit import backends, registry
from labkit.kvcache.contiguous import ContiguousCache
from labkit.perf.timer import NULL_TIMER

CAPACITY = 48


def quantize(transformer, config):
    if config is not None:
        component, config = registry.find("weights", config)
        transformer = component.build(config, transformer=transformer)
    return transformer


def dense_twin(transformer):
    """The same numbers in plain linears: the packed weights, unpacked."""
    twin = copy.deepcopy(transformer)
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "dequantize"):
                plain = torch.nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)
                plain.weight.data, plain.requires_grad = child.dequantize(), False
                if child.bias is not None:
                    plain.bias = child.bias
                setattr(parent, name, plain.requires_grad_(False))
    if hasattr(twin.embedding, "head"):
        table = torch.nn.Embedding.from_pretrained(twin.head.weight.data)
        twin.embedding = table
    return twin


def cache_for(transformer, dtype=torch.float32, n_sequences=1, capacity=CAPACITY):
    return ContiguousCache(transformer.cache_entries, capacity_tokens=capacity, dtype=dtype, n_sequences=n_sequences)


def run(step, ids, chunks):
    """Logits of each step: ``ids`` in runs of ``chunks`` tokens."""
    out, at = [], 0
    for n in chunks:
        out.append(step(ids[at : at + n], timer=NULL_TIMER, should_stop=lambda: False).float())
        at += n
    return torch.cat(out)


def compare(transformer, oracle, *, dtype=torch.float32, chunks=(5, 1, 1, 1, 4, *[1] * 20)):
    torch.manual_seed(1)
    ids = torch.randint(0, transformer.config.vocab_size, (sum(chunks),))
    with torch.inference_mode():
        step = backends.bind("fused", transformer=transformer, cache=cache_for(transformer, dtype))[1]
        assert step.computed_by == "fused"
        got = run(step, ids, chunks)
        wanted = run(backends.ReferenceStep(oracle, cache_for(oracle, dtype)), ids, chunks)
    return got, wanted
