"""Speculative decoding beside plain decoding, in turn: acceptance, both costs, the formula's speed-up and the clock's.

    python benchmarks/speculative.py [--weights int8] [--tokens 64] [--pairs 3] [--only rounded] [--exact]

Each row: a drafter, a kind of text, a draft length (0: chosen as the run goes). Costs are in steps of plain decoding of
the same text; the formula is (1 - a^(n+1)) / (1 - a) / (v + n c). ``--exact`` draws 20,000 first tokens of the default
model with a drafter's proposals and compares their distribution with the model's own (chi-square).
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import torch

import labkit
from labkit import backends
from labkit.decoding import EarlyExit, PromptLookup, Rounded, Sampler, Sampling, TrainedHead
from labkit.decoding.account import account
from labkit.decoding.draft_model import first_layers
from labkit.decoding.drafters import Draft, choose
from labkit.decoding.sampling import shape_logits
from labkit.decoding.speculative import verify
from labkit.prompts import ready_prompt
from labkit.ui.panels.speculative import TO_COPY

CONFIGS = {
    "prompt-lookup": PromptLookup(),
    "rounded": Rounded(),
    "trained-head": TrainedHead(),
    "early-exit": EarlyExit(share=0.8),
}
TEXTS = {
    "copy": (TO_COPY, False),
    "chat": (ready_prompt("first").text, True),
    "prose": (ready_prompt("story").text, False),
    "code": (ready_prompt("code").text, False),
}
LENGTHS = (0, 1, 2, 4, 6)
N_SAMPLES = 20_000


def token_s(trace: Any) -> float:
    return sum(trace.itl_s) / max(1, len(trace.itl_s))


def measure(model: labkit.Model, name: str, drafter: Any, text: str, n_draft: int, options: Any) -> str:
    """One row: ``options.pairs`` pairs of runs, in turn."""
    prompt, chat = TEXTS[text]
    how: dict[str, Any] = {"max_new_tokens": options.tokens, "chat": chat, "ignore_eos": True}
    drafter.n_draft = n_draft
    plain, drafted = labkit.Pipeline(model), labkit.Pipeline(model, drafter=drafter)
    alone, done = [], []
    for _ in range(options.pairs):
        alone.append(plain.generate(prompt, **how))
        done.append(drafted.generate(prompt, **how))
    plain_s = median(token_s(c.trace) for c in alone)
    found = sorted((account(c.trace, plain_s) for c in done), key=lambda a: a.measured)
    mid = found[len(found) // 2]
    same = "same" if all(a.token_ids == d.token_ids for a, d in zip(alone, done, strict=True)) else "other"
    length = "auto" if n_draft == 0 else str(n_draft)
    return (
        f"{name:14} {text:6} {length:>4}   a {mid.acceptance:4.0%}  tokens/round {mid.tokens_per_round:4.2f}  "
        f"c {mid.draft_cost:5.3f}  v {mid.verify_cost:5.2f}   predicted {mid.predicted:5.2f}  measured "
        f"{mid.measured:5.2f} ({found[0].measured:.2f} to {found[-1].measured:.2f})  {same} text"
    )


@torch.inference_mode()
def exact(model: labkit.Model) -> str:
    """First tokens drawn through a draft, beside the model's own chances for them."""
    sampling = Sampling(temperature=0.9, top_k=50, top_p=0.95)
    ids = model.tokenizer.encode_prompt("Once upon a time there was a")
    shorter = first_layers(model.transformer, round(0.9 * model.config.n_layers))
    p, q = (
        t(torch.tensor(ids), _cache(model, t, len(ids)), rows="last")[0].float() for t in (model.transformer, shorter)
    )
    sampler = Sampler(sampling, seed=11, device="cpu")
    counts = torch.zeros(model.config.vocab_size)
    n_held = 0
    for _ in range(N_SAMPLES):
        token, chances = sampler.draw(q)
        tokens = verify(torch.stack((p, p)), Draft([token], [chances]), sampler)
        counts[tokens[0]] += 1
        n_held += len(tokens) - 1
    wanted = shape_logits(p, sampling).double().softmax(0) * N_SAMPLES
    likely = wanted >= 5
    value = ((counts[likely] - wanted[likely]) ** 2 / wanted[likely]).sum().item()
    n = int(likely.sum()) - 1
    impossible = int(counts[wanted == 0].sum())
    return (
        f"chi-square over {N_SAMPLES:,} first tokens: {value:.1f} on {n} degrees of freedom "
        f"({(value - n) / (2 * n) ** 0.5:+.1f} standard deviations); {impossible} impossible tokens; "
        f"{n_held / N_SAMPLES:.0%} of the guesses held"
    )


def _cache(model: Any, transformer: Any, n_tokens: int) -> Any:
    from labkit.kvcache.contiguous import ContiguousCache

    return ContiguousCache(transformer.cache_entries, capacity_tokens=n_tokens, dtype=model.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speculative decoding beside plain decoding.")
    parser.add_argument("--weights", default="plain")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--only", choices=list(CONFIGS))
    parser.add_argument("--texts", nargs="*", choices=list(TEXTS), default=list(TEXTS))
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS))
    parser.add_argument("--exact", action="store_true")
    options = parser.parse_args()
    backends.prepare()
    model = labkit.load(weights=options.weights)
    print(f"{model}, {torch.get_num_threads()} threads, {options.tokens} tokens, {options.pairs} pairs in turn")
    if options.exact:
        print(exact(model))
        return
    for name, config in CONFIGS.items():
        if options.only not in (None, name):
            continue
        try:
            drafter = choose(config, target=model)
        except (ValueError, FileNotFoundError) as error:
            print(f"{name}: {error}")
            continue
        for text in options.texts:
            for n_draft in options.lengths:
                print(measure(model, name, drafter, text, n_draft, options), flush=True)


if __name__ == "__main__":
    main()
