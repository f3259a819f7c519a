"""What the compiled step computes here, as digests: each of a tier's numbers beside another tier's, bit for bit.

python -m tests.emulators.digests > one        on one processor, or LABKIT_CPU=plain, or in an emulator
python -m tests.emulators.digests > two        elsewhere: the files are the same
python -m tests.emulators.digests w8a8         only what has the word in its name

A line each: what, how many float32 numbers, and the digest of their bits. Inputs come from numpy, since PyTorch draws
other random numbers on other processors. Lines that begin with "step" hold what PyTorch and the C library compute too
(rotations, exponentials), so they are the same on machines of one architecture.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from labkit.backends.fused_step import FusedStep
from labkit.kernels import panel_layout
from labkit.kernels.cpu import linear, plan, tiers
from labkit.perf.timer import NULL_TIMER
from labkit.quant import W8A8, Int4, Int8, StoredLinear, block_groups, blocks
from tests.kernels.compare import cache_for, quantize
from tests.kernels.families import FAMILIES, random_model

SHAPES = ((20, 1280), (50, 512), (7, 2560))
"""Rows that do not fill a panel; inputs of several pieces; few rows for many threads, so that tokens are cut."""
COUNTS = (1, 2, 3, 4, 5, 8, 9, 30, 61)
METHODS = {
    "int8": Int8(), "w8a8": W8A8(), "int4, 32": Int4(32), "int4, 64": Int4(64),
    "int4, 128, symmetric": Int4(128, symmetric=True),
}  # fmt: skip
GROUPS = (16, 32, 64, 256)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


def products() -> Iterator[tuple[str, list[int], object]]:
    """A name, a row of the table of linears, and what must be kept while it is used."""
    for n_out, n_in in SHAPES:
        for name, method in METHODS.items():
            given = nn.Linear(n_in, n_out, bias=False).requires_grad_(False)
            given.weight.copy_(numbers(n_out, n_out, n_in))
            module = method.layer("", given)
            yield f"{name} {n_out} x {n_in}", plan.describe(module), module
        for kind in filter(block_groups.has, blocks.FORMATS):
            module = StoredLinear(kind, blocks.anything(kind, n_out, n_in), n_in)
            yield f"{kind} {n_out} x {n_in}", plan.describe(module), module
    for bits in panel_layout.PLANES:
        for group in GROUPS:
            rng = np.random.default_rng(bits + group)
            codes = torch.from_numpy(rng.integers(0, 2**bits, (37, 768), np.uint8))
            scales, minima = (torch.from_numpy(rng.random((37, 768 // group), np.float32)).half() for _ in range(2))
            for offsets in ({}, {"minima": minima}, {"minima": minima.float() * 1.1}):
                panels = panel_layout.pack(codes, scales, bits=bits, **offsets)
                of = ", ".join(f"{name} {value.dtype}" for name, value in offsets.items())
                yield f"{bits} bits, groups of {group} {of}", plan.of_panels(panels), panels


def digest(tensors: list[torch.Tensor]) -> str:
    content = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)
    return f"{sum(tensor.numel() for tensor in tensors)} {hashlib.sha256(content).hexdigest()[:24]}"


def main(word: str = "") -> None:
    print("#", tiers.in_use().name, flush=True)
    with torch.inference_mode():
        for name, row, _kept in products():
            if word not in name:
                continue
            n_in = int(row[plan.N_IN])
            x = numbers(1, max(COUNTS), n_in) * torch.from_numpy(np.geomspace(0.1, 10, n_in).astype(np.float32))
            found = []
            for n_threads in (1, 3):
                with linear.compiled_products(n_threads):
                    found += [linear.multiply(row, x[:n], None) for n in COUNTS]
            print(f"product {name}: {digest(found)}", flush=True)
        for family, config in FAMILIES.items():
            if family == "long":  # its widths are not whole groups
                continue
            for weights in (None, Int8(), W8A8(), Int4(group_size=32, head="int4")):
                if word not in str(weights).lower():
                    continue
                transformer = random_model(config)
                for i, parameter in enumerate(transformer.parameters()):
                    parameter.copy_(numbers(i, *parameter.shape) * 0.15 + (1.0 if parameter.ndim == 1 else 0.0))
                transformer = quantize(transformer, weights)
                ids, found = torch.arange(21) * 7 % 101, []
                for sizes in ([21], [8, 3, 2, 4] + [1] * 4):
                    step, at = FusedStep(transformer, cache_for(transformer), 2), 0
                    for n in sizes:
                        given = ids[at : at + n]
                        found.append(step(given, rows="all", timer=NULL_TIMER, should_stop=lambda: False).float())
                        at += n
                print(f"step {family}, {weights}: {digest(found)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
