"""Is greedy decoding with a drafter the same text as without? Every drafter, 100 prompts, by weights and cache.

    python benchmarks/drafts_exact.py [--weights stored int8 int4 plain] [--caches contiguous paged none]
                                      [--prompts 100] [--tokens 24]

Prompts are headings and first sentences of Python's own manual, a third of them as a chat; the model's own dtype. A row
says how many of the texts were the same, token by token, and how many guesses were checked and held on the way: without
guesses that held, the same text would say nothing.
"""

from __future__ import annotations

import argparse
import re
from pydoc_data import topics
from typing import Any

from speculative import CONFIGS

import labkit
from labkit import backends
from labkit.decoding.drafters import choose


def prompts(n: int) -> list[tuple[str, bool]]:
    """``n`` beginnings, and whether each is sent as a chat message."""
    found = []
    for text in topics.topics.values():
        for paragraph in re.split(r"\n\s*\n", text):
            words = " ".join(paragraph.split())
            if 40 <= len(words) <= 400 and words[0].isupper():
                found.append(words[: 40 + 23 * (len(found) % 7)])
    step = max(1, len(found) // n)
    return [(words, i % 3 == 0) for i, words in enumerate(found[::step][:n])]


def drafters_for(model: labkit.Model) -> dict[str, Any]:
    """Every drafter that this model can have."""
    made: dict[str, Any] = {}
    for name, config in CONFIGS.items():
        try:
            made[name] = choose(config, target=model)
        except (ValueError, FileNotFoundError) as error:
            print(f"  {name}: {error}")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--weights", nargs="+", default=["stored", "int8", "int4", "plain"])
    parser.add_argument("--caches", nargs="+", default=["contiguous", "paged", "none"])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    backends.prepare()
    asked = prompts(args.prompts)
    n_other = 0
    for weights in args.weights:
        model = labkit.load(weights=weights)
        print(f"{model}: {len(asked)} prompts, {args.tokens} tokens each")
        made = drafters_for(model)
        for cache in args.caches:
            how = [{"prompt": text, "chat": chat, "max_new_tokens": args.tokens} for text, chat in asked]
            plain = [labkit.Pipeline(model, kv_cache=cache).generate(**one).token_ids for one in how]
            for name, drafter in made.items():
                pipeline = labkit.Pipeline(model, kv_cache=cache, drafter=drafter)
                done = [pipeline.generate(**one) for one in how]
                same = sum(d.token_ids == ids for d, ids in zip(done, plain, strict=True))
                n_other += len(asked) - same
                rounds = [r for d in done for r in d.trace.meta.get("speculation", {"rounds": []})["rounds"]]
                drafted, held = sum(len(r["proposed"]) for r in rounds), sum(r["n_accepted"] for r in rounds)
                print(
                    f"  {cache:11} {name:14} {same} of {len(asked)} the same; {held} of {drafted} guesses held",
                    flush=True,
                )
    raise SystemExit(1 if n_other else 0)


if __name__ == "__main__":
    main()
