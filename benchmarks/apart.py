"""What a chat template or a pattern costs that labkit has not met: it runs in a process of its own.

python benchmarks/apart.py            # the process's start, one template, one split; here and apart, in turn
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from labkit.checkpoint.fetch import fetch_default
from labkit.checkpoint.gguf import GGUFFile
from labkit.tokenizer import apart, chat, patterns
from labkit.tokenizer.pretokenize import PreTokenizer

MESSAGES = [{"role": "user", "content": "Hello"}]
TEXT = "The quick brown fox, 42 times. " * 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with GGUFFile(fetch_default()) as file:
        template = file.metadata["tokenizer.chat_template"]
    here, there = PreTokenizer([patterns.SMOLLM]), PreTokenizer([patterns.SMOLLM + "|(?!)"])
    print(f"start of the process: {median(_start_s(template) for _ in range(rounds)) * 1e3:.1f} ms")
    jobs: dict[str, Callable[[], Any]] = {
        "template here": lambda: chat.render(template, MESSAGES),
        "template apart": lambda: chat.render(template + " ", MESSAGES),
        f"split of {len(TEXT)} characters here": lambda: here(TEXT),
        f"split of {len(TEXT)} characters apart": lambda: there(TEXT),
    }
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(20 * rounds):
        for name, job in jobs.items():
            times[name].append(_seconds(job))
    for name, values in times.items():
        print(f"{name}: {median(values) * 1e3:.3f} ms")


def _start_s(template: str) -> float:
    apart.end()
    return _seconds(lambda: chat.render(template + " ", MESSAGES))


def _seconds(job: Callable[[], Any]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
