"""What rounding activations costs, by how they are rounded: plain PyTorch, no kernel.

    python benchmarks/activations.py [--text FILE] [--windows 4] [--length 1024] [--weights stored]

Every product's input is rounded to a grid, a step a block of neighbours, as a kernel would. Perplexity and the share
of places where the most likely token is the same, against activations as they are. Without ``--text``: the prose of
Python's own manual. A minute a row on two cores.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import Tensor

import labkit
from labkit.kvcache.contiguous import ContiguousCache

GRIDS = {
    "as they are": None,
    "16 bits, 64 to a step": (64, 32767),
    "8 bits, 16 to a step": (16, 127),
    "8 bits, 32 to a step": (32, 127),
    "8 bits, 64 to a step": (64, 127),
    "7 bits, 64 to a step (w8a8)": (64, 63),
}
N_SKIPPED = 64
"""The first tokens of a window have too little before them to be judged by."""


def rounded(x: Tensor, block: int, levels: int) -> Tensor:
    n = x.shape[-1]
    blocks = F.pad(x.float(), (0, -n % block)).unflatten(-1, (-1, block))
    step = (blocks.abs().amax(-1, keepdim=True) / levels).clamp_min(1e-30)
    return (torch.round(blocks / step) * step).flatten(-2)[..., :n]


@contextmanager
def rounding(grid: tuple[int, int] | None) -> Iterator[None]:
    """Within this block every linear product rounds its input."""
    exact = F.linear
    if grid is not None:
        F.linear = lambda x, weight, bias=None: exact(rounded(x, *grid), weight, bias)
    try:
        yield
    finally:
        F.linear = exact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--weights", default="stored")
    options = parser.parse_args()
    model = labkit.load(dtype="fp32", weights=options.weights, backend="reference")
    text = options.text.read_text() if options.text else "\n".join(topics.topics.values())
    ids = model.tokenizer.encode(text[: 16 * options.windows * options.length])
    windows = [ids[i * options.length : (i + 1) * options.length] for i in range(options.windows)]
    exact: list[Tensor] = []
    before = 0.0
    print(f"{'activations':30} {'perplexity':>11} {'change':>9} {'same token':>11}")
    for name, grid in GRIDS.items():
        loss, same, n = 0.0, 0, 0
        for idx, window in enumerate(windows):
            with rounding(grid), torch.inference_mode():
                cache = ContiguousCache(
                    model.transformer.cache_entries, capacity_tokens=len(window), dtype=torch.float32
                )
                found = model.transformer(torch.tensor(window), cache)[N_SKIPPED:-1].float()
            if grid is None:
                exact.append(found.argmax(1))
            true = torch.tensor(window[N_SKIPPED + 1 :])
            loss -= found.log_softmax(-1).gather(1, true[:, None]).sum().item()
            same += int((found.argmax(1) == exact[idx]).sum())
            n += len(true)
        perplexity = math.exp(loss / n)
        before = before or perplexity
        print(f"{name:30} {perplexity:11.4f} {perplexity / before - 1:+9.4%} {same / n:11.2%}", flush=True)


if __name__ == "__main__":
    main()
