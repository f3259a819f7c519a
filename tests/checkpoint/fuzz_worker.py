"""Run by test_fuzz.py in a process of its own: mutate a model file some hundred times and load each mutant.

Prints one JSON line: how often it loaded, how often it was refused, what else was raised, and the growth of the
process's peak memory over that of loading the intact file.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import sys
import traceback
from collections import Counter
from pathlib import Path

import torch

import labkit

HUGE = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def mutate(original: bytes, header_size: int, rng: random.Random) -> bytes:
    """One of: cut short, bits flipped, a number made extreme, bytes removed, inserted or moved."""
    data = bytearray(original)
    kind = rng.choice(("cut", "flip", "number", "number", "number", "remove", "insert", "swap", "text"))
    at = rng.randrange(header_size if rng.random() < 0.85 else len(data))
    if kind == "cut":
        del data[rng.choice((at, rng.randrange(len(data)))) :]
    elif kind == "flip":
        for _ in range(rng.choice((1, 1, 4, 32))):
            i = rng.randrange(header_size)
            data[i] ^= 1 << rng.randrange(8)
    elif kind == "number":
        form = rng.choice(("<Q", "<I"))
        value = rng.choice(HUGE) & (2 ** (8 * struct.calcsize(form)) - 1)
        data[at : at + struct.calcsize(form)] = struct.pack(form, value)
    elif kind == "remove":
        del data[at : at + rng.randrange(1, 64)]
    elif kind == "insert":
        data[at:at] = rng.randbytes(rng.randrange(1, 64))
    elif kind == "swap":
        other = rng.randrange(header_size)
        data[at : at + 16], data[other : other + 16] = data[other : other + 16], data[at : at + 16]
    else:
        digits = [i for i in range(header_size) if chr(data[i]).isdigit()]
        data[rng.choice(digits)] = ord(rng.choice("0123456789-e.[\"'"))
    return bytes(data)


def main() -> None:
    file, model, n_mutations, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    original = file.read_bytes()
    header_size = int(sys.argv[5])
    rng = random.Random(seed)
    for _ in range(3):
        labkit.load(model, device="cpu", dtype="fp32")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: Counter[str] = Counter()
    surprises: list[str] = []
    for i in range(n_mutations):
        file.write_bytes(mutate(original, header_size, rng))
        try:
            labkit.load(model, device="cpu", dtype="fp32")
            outcomes["loaded"] += 1
        except ValueError as error:
            outcomes["refused" if str(error).strip() else "silent"] += 1
        except Exception as error:  # noqa: BLE001 (that is the question)
            where = traceback.extract_tb(error.__traceback__)[-1]
            surprises.append(f"{i}: {type(error).__name__}: {error} at {where.filename}:{where.lineno}")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    growth_bytes = (after - before) * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps({**outcomes, "surprises": surprises, "growth_bytes": growth_bytes, "nbytes": len(original)}))


if __name__ == "__main__":
    main()
