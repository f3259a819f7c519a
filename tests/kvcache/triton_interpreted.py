"""Run by test_triton in a process of its own: the Triton kernel, interpreted on CPU tensors, under real caches."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from labkit.kernels.triton import stored as triton_cache
from labkit.kvcache import blocks
from labkit.kvcache.reader import TritonReader
from tests.kvcache.drive import BLOCKED, Driver, build, layer

BOUND = {"paged": 3e-6, "int8": 0.03, "int4": 0.4}


class Counting(TritonReader):
    n_calls = 0

    def attend(self, *args):
        Counting.n_calls += 1
        return super().attend(*args)


blocks.make_reader = lambda cache: Counting(cache, triton_cache)
triton_cache.MIN_STRETCH = 32  # so that short tests cut the work up too
torch.set_num_threads(1)


def check(name: str, layers, *, dtype=torch.float32, slack: float = 0.0, **options) -> None:
    driver = Driver(build(name, layers, n_sequences=3, capacity_tokens=200, dtype=dtype), **options)
    driver.cache.read_by_kernel()
    driver.step({0: 70, 5: 9}, check=False)
    driver.step({5: 3, 0: 1})
    driver.cache.free(0)
    driver.step({1: 66}, check=False)
    driver.step({1: 1, 5: 2})
    kind = "int8" if "int8" in name else "int4" if "int4" in name else "paged"
    print(f"{name} {dtype} {driver.worst:.2e}")
    assert driver.worst < BOUND[kind] + slack, (name, driver.worst)


for name in BLOCKED:
    sight = {"window": 20, "n_sinks": 3} if name in ("paged", "int4") else {}
    check(name, [layer(2, 16, **sight)])
check("paged", [layer(1, 24, 40)], n_heads=5, softcap=4.0)
check("int8", [layer(3, 32, 64)], n_heads=9, softcap=4.0)
check("paged", [layer(2, 16)], dtype=torch.float16, slack=5e-3)
check("int4", [layer(2, 16)], dtype=torch.bfloat16, slack=2e-2)
assert Counting.n_calls > 20
print("equal")
