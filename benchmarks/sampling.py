"""What choosing a token costs on a CPU right after a step, which has swept the caches: labkit's way and PyTorch's.

    python benchmarks/sampling.py [--rounds 41]

Real logits of the default model; before each choice 240 MB are read, as a step reads its weights. Milliseconds, medians
and quartiles; both ways take turns. ``labkit.decoding.sampler`` runs the first on a CPU, the second on other devices.
"""

from __future__ import annotations

import argparse
import time
from statistics import median, quantiles

import numpy as np
import torch

import labkit
from labkit import Sampling
from labkit.decoding import Sampler

SAMPLINGS = {
    "temperature 0.8": Sampling(0.8),
    "and top-k 40": Sampling(0.8, top_k=40),
    "and top-p 0.9": Sampling(0.8, top_p=0.9),
    "and min-p 0.05": Sampling(0.8, min_p=0.05),
    "temperature 1.5, top-p 0.99": Sampling(1.5, top_p=0.99),
    "greedy, repetition penalty": Sampling(repetition_penalty=1.2),
}


def seconds(sampler: Sampler, logits: torch.Tensor, swept: np.ndarray) -> float:
    swept.sum()
    began = time.perf_counter()
    sampler(logits)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    model = labkit.load(backend="reference", device="cpu", weights="plain")
    with torch.inference_mode():
        logits = model(model.tokenizer.encode("The best thing about rain is"))[-1].float()
    swept = np.ones(30_000_000)
    print("| | labkit, ms | PyTorch's operations, ms | ratio |\n|---|---|---|---|")
    for name, sampling in SAMPLINGS.items():
        ours, theirs = (Sampler(sampling, seed=0, device="cpu") for _ in range(2))
        theirs._chance = torch.Generator().manual_seed(0)
        took: dict[Sampler, list[float]] = {ours: [], theirs: []}
        for _ in range(options.rounds):
            for sampler, times in took.items():
                times.append(seconds(sampler, logits, swept) * 1e3)
        cells = []
        for times in took.values():
            low, _, high = quantiles(times, n=4)
            cells.append(f"{median(times):.2f} ({low:.2f}-{high:.2f})")
        print(f"| {name} | {cells[0]} | {cells[1]} | {median(took[theirs]) / median(took[ours]):.1f} |")


if __name__ == "__main__":
    main()
