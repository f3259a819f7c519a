"""Weights in fewer bits: what they weigh, and what rounding them costs in quality.

    python benchmarks/weights.py [--windows 3] [--length 1024] [--json FILE]

Perplexity on the prose of Python's own manual, beside unpacked weights in float32; the mean divergence
and error of the logits; the share of places where the most likely token is the same. The prompt path computes, as in
prefill: that is where W8A8 rounds activations too.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch

import labkit
from labkit.kvcache.contiguous import ContiguousCache
from labkit.quant import W8A8, Int4, Int8

CHOICES: dict[str, Any] = {
    "unpacked": "plain",
    "int8": Int8(),
    "w8a8": W8A8(),
    "int4, groups of 32": Int4(group_size=32),
    "int4, groups of 64": Int4(group_size=64),
    "int4, groups of 64, symmetric": Int4(group_size=64, symmetric=True),
    "int4, groups of 64, head too": Int4(group_size=64, head="int4"),
}
N_SKIPPED = 64
"""The first tokens of a window have too little before them to be judged by."""


@torch.inference_mode()
def logits_of(model: Any, window: list[int]) -> torch.Tensor:
    """Logits (T, V) of a whole window through the model's own forward."""
    cache = ContiguousCache(model.transformer.cache_entries, capacity_tokens=len(window), dtype=torch.float32)
    return model.transformer(torch.tensor(window), cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ids = labkit.load().tokenizer.encode("\n".join(topics.topics.values())[:120_000])
    windows = [ids[i * args.length : (i + 1) * args.length] for i in range(args.windows)]
    exact: list[torch.Tensor] = []
    rows = []
    print(f"{'weights':32} {'MB':>6} {'perplexity':>11} {'change':>8} {'KL, nats':>9} {'logit error':>12} {'same':>6}")
    for name, weights in CHOICES.items():
        model = labkit.load(dtype="fp32", weights=weights)
        loss, divergence, error, same, n = 0.0, 0.0, 0.0, 0, 0
        for idx, window in enumerate(windows):
            found = logits_of(model, window)[N_SKIPPED:-1]
            if weights == "plain":
                exact.append(found.half())
            true, wanted = torch.tensor(window[N_SKIPPED + 1 :]), exact[idx].float()
            log_p, log_q = wanted.log_softmax(-1), found.log_softmax(-1)
            loss -= log_q.gather(1, true[:, None]).sum().item()
            divergence += (log_p.exp() * (log_p - log_q)).sum().item()
            error += (found - wanted).abs().mean(dim=1).sum().item()
            same += int((found.argmax(1) == wanted.argmax(1)).sum())
            n += len(true)
        perplexity = math.exp(loss / n)
        rows.append(
            {"weights": name, "nbytes": model.nbytes, "perplexity": perplexity, "kl_nats": divergence / n,
             "logit_error": error / n, "same_token": same / n, "n_tokens": n}
        )  # fmt: skip
        change = perplexity / rows[0]["perplexity"] - 1
        print(
            f"{name:32} {model.nbytes / 1e6:6.0f} {perplexity:11.3f} {change:+8.2%} {divergence / n:9.4f} "
            f"{error / n:12.4f} {same / n:6.1%}"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
