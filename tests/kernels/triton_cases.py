"""Run in a process of its own with TRITON_INTERPRET=1: every Triton kernel against plain PyTorch, on CPU tensors."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from labkit.kernels import ops, packed
from labkit.kernels.triton import attention, elementwise, matvec, sampling
from labkit.quant import grid
from labkit.quant.linear import Int4Linear, Int8Linear


def close(got, wanted, tolerance=1e-5):
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def rms_norm(device):
    for width, unit_offset in ((64, False), (100, True)):
        x, w = torch.randn(3, width, device=device), torch.randn(width, device=device)
        got = elementwise.rms_norm(x, w, 1e-5, unit_offset=unit_offset)
        close(got, ops.rms_norm(x, w, 1e-5, unit_offset=unit_offset))


def rotate_append(device):
    for layout, turned in (("half", 16), ("interleaved", 16), ("half", 8)):
        q, k, v = (torch.randn(2, n, 16, device=device) for n in (4, 2, 2))
        cos, sin = torch.randn(2, turned // 2, device=device), torch.randn(2, turned // 2, device=device)
        caches = [torch.zeros(2, 9, 16, device=device) for _ in range(2)]
        positions = torch.tensor([5, 6], device=device)
        got = elementwise.rotate_append(q, k, v, cos, sin, positions, *caches, layout=layout)
        close(got, ops.rotate(q, cos, sin, layout=layout))
        close(caches[0][:, 5:7], ops.rotate(k, cos, sin, layout=layout).transpose(0, 1))
        close(caches[1][:, 5:7], v.transpose(0, 1))
        assert not caches[0][:, :5].any()
        assert not caches[0][:, 7:].any()


def gate(device):
    g, u = torch.randn(2, 700, device=device), torch.randn(2, 700, device=device)
    close(elementwise.gate(g, u), torch.nn.functional.silu(g) * u)


def attend_one(device):
    options = ({}, {"window": 7}, {"window": 7, "n_sinks": 2}, {"softcap": 5.0})
    for n_stored in (1, 33, 90):
        for option in options:
            q = torch.randn(1, 6, 16, device=device)
            k, v = torch.randn(2, 96, 16, device=device), torch.randn(2, 96, 16, device=device)
            length = torch.tensor([n_stored], device=device)
            got = attention.attend_one(q, k, v, length, scale=0.3, keys_a_stretch=32, **option)
            wanted = ops.attend(q, k[:, :n_stored], v[:, :n_stored], n_past=n_stored - 1, scale=0.3, **option)
            close(got, wanted, 1e-4)


def linear_int8(device):
    linear = Int8Linear(*grid.round_int8(torch.randn(21, 80)), torch.randn(21)).to(device)
    x = torch.randn(2, 80, device=device)
    got = matvec.linear_int8(x, linear.weight, linear.scales, linear.bias)
    close(got, packed.linear_int8(x, linear.weight, linear.scales, linear.bias), 1e-4)


def linear_int4(device):
    for group, symmetric, n_in in ((32, False, 96), (64, True, 320), (128, False, 256)):
        linear = Int4Linear(*grid.round_int4(torch.randn(10, n_in), group, symmetric=symmetric)).to(device)
        x = torch.randn(2, n_in, device=device)
        weights = (linear.weight, linear.scales, linear.zeros, group, 10, None)
        close(matvec.linear_int4(x, *weights), packed.linear_int4(x, *weights), 1e-4)


def argmax(device):
    logits = torch.randn(3000, device=device)
    logits[[7, 2500]] = 9.0  # a tie: the first wins, as in torch
    out = torch.zeros(1, dtype=torch.int64, device=device)
    assert int(sampling.argmax(logits, out)) == int(logits.argmax()) == 7


def step(device):
    """The captured step (without a graph on a CPU) against the model's own forward, and its own greedy loop."""
    from labkit import registry
    from labkit.kernels import backends
    from labkit.kernels.triton.step import GraphStep
    from labkit.kvcache.contiguous import ContiguousCache
    from labkit.perf.timer import NULL_TIMER
    from labkit.quant import Int4
    from tests.kernels.families import FAMILIES, random_model

    for weights, family in ((None, "sinks"), (Int4(32), "partial, interleaved")):
        config = FAMILIES[family]
        layers = tuple(replace(layer, ffn=replace(layer.ffn, activation="silu")) for layer in config.layers[:1])
        transformer = random_model(replace(config, layers=layers))
        if weights is not None:
            transformer = registry.find("weights", weights)[0].build(weights, transformer=transformer)
        transformer.to(device)
        caches = [ContiguousCache(transformer.cache_entries, capacity_tokens=16, device=device) for _ in range(2)]
        steps = [GraphStep(transformer, caches[0]), backends.ReferenceStep(transformer, caches[1])]
        ids, options = torch.arange(9, device=device), {"timer": NULL_TIMER, "should_stop": lambda: False}
        with torch.inference_mode():
            for at in (slice(0, 7), slice(7, 8), slice(8, 9)):
                got, wanted = (step(ids[at], **options) for step in steps)
                close(got, wanted, 1e-3)
            start = token = wanted.argmax(-1)
            chosen = []
            for _ in range(2):
                token = steps[1](token, **options).argmax(-1)
                chosen.append(int(token))
            assert steps[0].decode_many(start, 2).tolist() == chosen


CASES = [rms_norm, rotate_append, gate, attend_one, linear_int8, linear_int4, argmax, step]


def main(device="cpu"):
    torch.manual_seed(0)
    for case in CASES:
        case(device)
        print(case.__name__, "ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
