"""How large a block of the paged cache should be: what it wastes on texts of some lengths, and what reading it costs.

    python benchmarks/blocks.py [--only waste speed] [--requests 64] [--steps 30] [--json FILE]

Waste is counted: the serving engine's own scheduler and allocator, with no model behind them. Speed is a decode step of
eight texts in a model of two layers that is nearly all attention, in the processor's time, sizes in turn, medians.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import labkit
from labkit import backends
from labkit.checkpoint.random_weights import random_transformer
from labkit.engine import Engine
from labkit.kvcache import Paged
from labkit.model import Model, ModelConfig
from labkit.model.config import DenseFFN, GroupedAttention, Rope, uniform
from labkit.perf.timer import Timer
from labkit.sequence import Sequence
from labkit.serving import Continuous, Service

SIZES = (8, 16, 32)
TEXTS = {
    "prompts of 5, answers of 10": (range(5, 6), range(10, 11)),
    "prompts of 20 to 148, answers of 8 to 160": (range(20, 149, 16), (8, 12, 16, 24, 32, 160)),
    "prompts of 20 to 400, answers of 50 to 600": (range(20, 400), range(50, 600)),
}


class Bookkeeping:
    """A step that keeps the cache's books, and computes nothing."""

    computed_by, reason, hidden = "bookkeeping", "", None

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __call__(self, token_ids: torch.Tensor, *, counts: Any = None, **_: Any) -> torch.Tensor:
        self.cache.open(counts if counts is not None else len(token_ids))
        self.cache.commit()
        return torch.zeros(len(counts) if counts else 1, 300)

    def choose_next(self, token_id: int, **_: Any) -> None:
        return None


def model_of(n_layers: int) -> Model:
    """Nearly all attention: 9 query heads over 3 of 64, as the default model's, and next to no FFN."""
    layers = uniform(n_layers, GroupedAttention(9, 3, 64, rope=Rope()), DenseFFN(64))
    config = ModelConfig("llama", 512, 576, 2048, layers)
    made = random_transformer(config, device=torch.device("cpu"), dtype=torch.float32, name="blocks")
    return Model(made, labkit.load("random:tiny-llama").tokenizer, name="blocks")


def waste(args: Any) -> dict[str, Any]:
    """By texts and block size: the share of set-aside places that hold nothing, and a text's mean tokens."""
    bind, model = backends.bind, model_of(1)
    backends.bind = lambda choice, **of: (choice, Bookkeeping(of["cache"]))  # type: ignore[assignment]
    found: dict[str, Any] = {}
    try:
        for texts, (prompts, answers) in TEXTS.items():
            for size in SIZES:
                chance = random.Random(0)
                cache = Paged(block_size=size)
                with Service(model, scheduler=Continuous(), kv_cache=cache, start=False) as service:
                    for _ in range(args.requests):
                        ids = [chance.randrange(256) for _ in range(chance.choice(prompts))]
                        service.submit(ids, max_new_tokens=chance.choice(answers), ignore_eos=True)
                    while service.step():
                        pass
                held = sum(moment.held_tokens for moment in service.moments)
                reserved = sum(moment.reserved_tokens for moment in service.moments)
                row = found.setdefault(texts, {"a text, tokens": held / sum(m.n_requests for m in service.moments)})
                row[f"blocks of {size}"] = 1 - held / reserved
    finally:
        backends.bind = bind
    return found


def speed(args: Any) -> dict[str, Any]:
    """Processor milliseconds of a step, eight texts of 900 tokens, by block size."""
    backends.prepare()
    model, engines = model_of(2), {}
    for size in SIZES:
        timer = Timer(detail_every=0)
        engine = Engine(model, timer=timer, capacity_tokens=1100, n_sequences=8, kv_cache=Paged(block_size=size))
        texts = [
            Sequence(
                model,
                [(7 * n + at) % 256 for at in range(900)],
                timer=timer,
                sequence_id=n + 1,
                max_new_tokens=args.steps + 1,
                ignore_eos=True,
            )
            for n in range(8)
        ]
        timer.begin_step("prefill")
        engine.step(texts)
        timer.end_step()
        engines[size] = engine, texts, timer
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(args.steps):
        for size, (engine, texts, timer) in engines.items():
            timer.begin_step("decode")
            started = time.process_time()
            engine.step(texts)
            times[size].append((time.process_time() - started) * 1e3)
            timer.end_step()
    return {f"blocks of {size}, processor ms": median(taken) for size, taken in times.items()}


WORK = {"waste": waste, "speed": speed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    out = {name: WORK[name](args) for name in args.only}
    print(json.dumps(out, indent=1))
    if args.json:
        args.json.write_text(json.dumps(out, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
