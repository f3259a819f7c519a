"""The tokenizer beside `tokenizers` and `tiktoken`: speed in interleaved rounds, peak memory, growth with length.

All engines run SmolLM2's vocabulary on the same texts (Python's help texts and the sources installed here), and their
ids are compared before anything is timed. Each round times every engine once; figures are medians over the rounds, so
what else the machine does hits all alike. Compare within one run only.

    python benchmarks/tokenizer.py                 # batch, long text, prompt latency, peak memory
    python benchmarks/tokenizer.py --growth        # pathological texts of growing length
    python benchmarks/tokenizer.py --no-split      # what leaving out the pre-tokenizer changes
    python benchmarks/tokenizer.py --crossover     # scan against queue, by word length
    python benchmarks/tokenizer.py --device cuda --mb 64
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import random
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

from _process import peak_bytes

from labkit.checkpoint.fetch import fetch_default
from labkit.checkpoint.gguf import GGUFFile
from labkit.tokenizer import Tokenizer, batch, merging, native, patterns
from labkit.tokenizer.byte_level import from_symbols

DOCUMENT_CHARS = 4_000
Engine = Callable[[list[str]], list[Any]]


def metadata() -> dict[str, Any]:
    with GGUFFile(fetch_default()) as file:
        return dict(file.metadata)


def corpus(n_bytes: int) -> str:
    """Help texts, then sources in a fixed order, until there are enough; characters without a token are left out."""
    parts = [topics[name] for name in sorted(topics)]
    size = sum(map(len, parts))
    folders = [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))]
    for path in itertools.chain.from_iterable(sorted(folder.rglob("*.py")) for folder in folders):
        if size >= n_bytes:
            break
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        parts.append(text)
        size += len(text)
    text = "\n\n".join(parts)[:n_bytes]
    return text.translate({code: None for code in (0x04, 0x06, 0x13, 0x14, 0x16, 0x1D)})


def documents(text: str) -> list[str]:
    return [text[i : i + DOCUMENT_CHARS] for i in range(0, len(text), DOCUMENT_CHARS)]


# ---- the engines -----------------------------------------------------------------------------------------------------


def ours(meta: dict[str, Any]) -> Engine:
    tokenizer = Tokenizer.from_gguf(meta)
    reason = tokenizer.warm_up()
    if reason:
        print("no compiled encoder:", reason)
    return lambda texts: tokenizer.encode_batch(texts) if len(texts) > 1 else [tokenizer.encode(texts[0])]


def ours_in_python(meta: dict[str, Any]) -> Engine:
    tokenizer = Tokenizer.from_gguf(meta)
    return lambda texts: [batch.encode_in_python(tokenizer, text, True) for text in texts]


def ours_on(meta: dict[str, Any], device: str) -> Engine:
    import torch

    tokenizer = Tokenizer.from_gguf(meta)

    def run(texts: list[str]) -> list[Any]:
        ids = tokenizer.encode_batch(texts, device=device)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return ids

    return run


def tokenizers_library(meta: dict[str, Any]) -> Engine:
    from tokenizers import Tokenizer as Reference
    from tokenizers import models, pre_tokenizers

    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])}
    reference = Reference(models.BPE(vocab, merges))
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return lambda texts: [row.ids for row in reference.encode_batch_fast(texts, add_special_tokens=False)]


def tiktoken_library(meta: dict[str, Any]) -> Engine:
    import tiktoken

    ranks = {from_symbols(token): i for i, token in enumerate(meta["tokenizer.ggml.tokens"]) if i > 16}
    spare = itertools.count(10**6)  # tiktoken wants a rank for every byte; the corpus holds none of these
    ranks |= {bytes([b]): next(spare) for b in range(256) if bytes([b]) not in ranks}
    encoding = tiktoken.Encoding("smollm2", pat_str=patterns.SMOLLM, mergeable_ranks=ranks, special_tokens={})
    n_threads = os.cpu_count() or 1
    return lambda texts: encoding.encode_ordinary_batch(texts, num_threads=n_threads)


ENGINES: dict[str, Callable[[dict[str, Any]], Engine]] = {
    "labkit": ours,
    "labkit, no compiler": ours_in_python,
    "tokenizers": tokenizers_library,
    "tiktoken": tiktoken_library,
}


def engine(name: str, meta: dict[str, Any]) -> Engine:
    return ours_on(meta, name.removeprefix("labkit on ")) if name.startswith("labkit on ") else ENGINES[name](meta)


# ---- what is measured ------------------------------------------------------------------------------------------------


def compare(engines: dict[str, Engine], texts: list[str], rounds: int, *, warm: bool = True) -> dict[str, float]:
    """Median seconds of each engine, rounds interleaved. The first round's ids must agree; warm: it is not counted."""
    expected = None
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for nth in range(rounds + warm):
        for name, run in engines.items():
            start = time.perf_counter()
            rows = run(texts)
            seconds[name].append(time.perf_counter() - start)
            if nth == 0:
                ids = [list(map(int, row)) for row in rows]
                expected = expected or ids
                assert ids == expected, f"{name} gives other ids"
    return {name: median(values[warm:]) for name, values in seconds.items()}


def peak_memory_mb(name: str, n_mb: float, shape: str) -> float:
    """Growth of the peak resident memory in a process of its own, from before the call to after it."""
    command = [sys.executable, __file__, "--child", name, "--mb", str(n_mb), "--shape", shape]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def child(name: str, n_mb: float, shape: str) -> None:
    text = corpus(int(n_mb * 1e6))
    run = engine(name, metadata())
    run([text[:20_000]] * 2)
    texts = documents(text) if shape == "batch" else [text]
    before = peak_bytes()
    run(texts)
    print((peak_bytes() - before) / 2**20)


def speed(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    meta = metadata()
    names = [*ENGINES, f"labkit on {arguments.device}"] if arguments.device else list(ENGINES)
    engines = {name: engine(name, meta) for name in names}
    text = corpus(int(arguments.mb * 1e6))
    n_mb = len(text.encode()) / 1e6
    rows: list[dict[str, Any]] = [{"engine": name} for name in names]
    for shape, texts in (("batch", documents(text)), ("one text", [text])):
        seconds = compare(engines, texts, arguments.rounds)
        for row in rows:
            row[f"{shape} MB/s"] = round(n_mb / seconds[row["engine"]], 2)
            if not arguments.no_memory:
                row[f"{shape} peak MB"] = round(peak_memory_mb(row["engine"], arguments.mb, shape.split()[0]))
    prompt = text[3_000:7_500]
    prompts = {name: run for name, run in engines.items() if " on " not in name}
    seconds = compare(prompts, [prompt], 50 * arguments.rounds)
    n_tokens = len(engines["labkit"]([prompt])[0])
    for row in rows:
        if row["engine"] in seconds:
            row[f"{n_tokens}-token prompt ms"] = round(seconds[row["engine"]] * 1e3, 3)
    return rows


def growth(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds for one text of one word, and what twice the length costs."""
    meta = metadata()
    engines = {name: engine(name, meta) for name in ("labkit", "labkit, no compiler", "tokenizers")}
    rows = []
    line = base64.b64encode(random.Random(1).randbytes(750_000)).decode()
    for kind, text in (("aaaa", "a" * 1_000_000), ("a line without spaces", line), ("spaces", " " * 1_000_000)):
        for n in (125_000, 250_000, 500_000, 1_000_000):
            seconds = compare(engines, [text[:n]], arguments.rounds, warm=False)
            rows.append({"text": kind, "characters": n, **{f"{name} s": round(s, 4) for name, s in seconds.items()}})
            print(rows[-1], flush=True)
    return rows


def no_split(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Share of the reference's tokens that are not tokens any more when a whole text is merged as one word."""
    tokenizer = Tokenizer.from_gguf(metadata())
    rows = []
    for kind, text in (("prose", "".join(topics[k] for k in sorted(topics))), ("Python", corpus(3_000_000)[-400_000:])):
        text = text[:400_000]
        whole = tokenizer._words[text]
        reference = tokenizer.encode(text)
        spans = [_spans(tokenizer, ids) for ids in (reference, whole)]
        changed = 100 * len(spans[0] - spans[1]) / len(spans[0])
        rows.append(
            {"text": kind, "tokens": len(reference), "without the split": len(whole), "changed %": round(changed, 1)}
        )
    return rows


def _spans(tokenizer: Tokenizer, ids: Any) -> set[tuple[int, int]]:
    ends = list(itertools.accumulate(len(tokenizer.token_bytes(i)) for i in ids))
    return set(zip([0, *ends], ends, strict=False))


def crossover(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    ranks = {merge: rank for rank, merge in enumerate(metadata()["tokenizer.ggml.merges"])}
    rng = random.Random(1)
    rows = []
    for n in (8, 16, 24, 32, 48, 64, 96, 128, 256):
        words = [[rng.choice("etaoinsrhld") for _ in range(n)] for _ in range(200)]
        row: dict[str, Any] = {"symbols": n}
        for name, merge in (("scan", merging._merge_by_scan), ("queue", merging._merge_by_queue)):
            times = []
            for _ in range(arguments.rounds):
                start = time.perf_counter()
                for word in words:
                    merge(word, ranks)
                times.append((time.perf_counter() - start) / len(words))
            row[f"{name} us"] = round(median(times) * 1e6, 1)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", help='also the tensor encoder on this device, e.g. "cuda"')
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--json", type=Path)
    for name in ("growth", "no-split", "crossover"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.mb, arguments.shape)
        return
    chosen = next((f for f in (growth, no_split, crossover) if getattr(arguments, f.__name__)), speed)
    rows = chosen(arguments)
    for row in rows:
        print("  ".join(f"{key}: {value}" for key, value in row.items()))
    if native.why_not():
        print(native.why_not())
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
