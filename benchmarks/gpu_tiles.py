"""Which tile is fastest for each one-token product on this GPU: where ``triton.product.tile_for`` has its sizes from.

    python benchmarks/gpu_tiles.py [--shapes smollm2-135m llama-2-7b] [--kinds 16 8 4] [--json FILE]

Each product runs on as many copies of its weights as a model has layers, or as fill twice the cache, replayed as one
CUDA graph: microseconds each, and the share of the copy bandwidth. Tiles are compiled first, in parallel.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def products(d_model: int, d_kv: int, d_ff: int, vocab_size: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """By name: the rows of each matrix, and their inputs."""
    return {
        "qkv": ((d_model, d_kv, d_kv), d_model),
        "o": ((d_model,), d_model),
        "gated": ((d_ff,), d_model),
        "down": ((d_model,), d_ff),
        "head": ((vocab_size,), d_model),
    }


SHAPES = {"smollm2-135m": products(576, 192, 1536, 49_152), "llama-2-7b": products(4096, 4096, 11_008, 32_000)}
NORMED = ("qkv", "gated", "head")
TILES = {
    16: [(2, 1024, 4), (4, 1024, 4), (4, 512, 2), (2, 512, 2), (2, 2048, 4), (1, 2048, 4), (2, 2048, 8)],
    8: [(2, 1024, 2), (4, 1024, 2), (4, 1024, 4), (4, 2048, 4), (2, 2048, 4), (4, 512, 2), (4, 512, 1)],
    4: [(4, 1024, 1), (4, 2048, 2), (4, 4096, 4), (4, 2048, 1), (4, 1024, 2)],
}
"""(rows, columns, warps): see ``product.Tile``."""


def matrix(kind: int, n_out: int, n_in: int, dtype: torch.dtype) -> Any:
    """Random weights in the stored form, without rounding real ones."""
    from labkit.kernels.triton.product import Matrix

    if kind == 16:
        weight = torch.randn(n_out, n_in, device="cuda", dtype=dtype)
        return Matrix(16, weight, weight, None, None, n_out, n_in, 64)
    if kind == 8:
        weight = torch.randint(-127, 128, (n_out, n_in), device="cuda", dtype=torch.int8)
        return Matrix(8, weight, torch.rand(n_out, device="cuda"), None, None, n_out, n_in, 64)
    panels, blocks, groups = -(-n_out // 4), -(-n_in // 64), n_in // 32
    words = torch.randint(0, 256, (panels, blocks, 4, 32), device="cuda", dtype=torch.uint8)
    scales = torch.rand(panels, groups, 4, device="cuda").half()
    zeros = torch.randint(0, 16, (panels, groups, 4), device="cuda", dtype=torch.uint8)
    return Matrix.packed(words, scales, zeros, None, n_out, n_in, 32)


def nbytes(matrices: list[Any]) -> int:
    scales = sum(m.scales.nbytes for m in matrices if m.kind != 16)
    zeros = sum(m.zeros.nbytes for m in matrices if m.zeros is not None)
    return sum(m.weight.nbytes for m in matrices) + scales + zeros


class Case:
    """One product on several copies of its weights."""

    def __init__(
        self, name: str, heights: tuple[int, ...], n_in: int, kind: int, dtype: torch.dtype, copies: int
    ) -> None:
        twice = heights * 2 if name == "gated" else heights
        self.name = name
        self.copies = [[matrix(kind, n_out, n_in, dtype) for n_out in twice] for _ in range(copies)]
        self.x = torch.randn(n_in, device="cuda", dtype=dtype)
        self.out = torch.randn(sum(heights), device="cuda", dtype=dtype)
        weight = torch.ones(n_in, device="cuda", dtype=dtype)
        self.norm = (
            type("Norm", (), {"weight": weight, "eps": 1e-5, "unit_offset": False})() if name in NORMED else None
        )
        self.nbytes = nbytes(self.copies[0])

    def run(self, tile: Any, copies: int | None = None) -> None:
        from labkit.kernels.triton import product

        for matrices in self.copies[:copies]:
            if self.name == "gated":
                gate, up = matrices
                product.gated(self.x, gate, up, self.out, norm=self.norm, tile=tile)
            else:
                residual = None if self.norm else self.out
                product.project(self.x, matrices, self.out, norm=self.norm, residual=residual, tile=tile)

    def microseconds(self, tile: Any) -> float:
        self.run(tile, 1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(tile)
        times = []
        for _ in range(7):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(self.copies))
        return median(times[1:])


def cases(options: argparse.Namespace, dtype: torch.dtype, compiling: bool) -> Any:
    for shape in options.shapes:
        for kind in options.kinds:
            for name, (heights, n_in) in SHAPES[shape].items():
                size = sum(heights) * n_in * kind // 8 * (2 if name == "gated" else 1)
                copies = 1 if compiling else max(2, min(30, 200_000_000 // size))
                yield shape, kind, Case(name, heights, n_in, kind, dtype, copies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--kinds", nargs="+", type=int, choices=[16, 8, 4], default=[16, 8, 4])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA device here (torch.cuda.is_available() is False).")
        return
    from labkit.kernels.triton.product import Tile

    dtype = torch.bfloat16 if torch.cuda.get_device_capability()[0] >= 8 else torch.float16
    n_compilers = min(12, os.cpu_count() or 1)
    if options.compile >= 0:
        for _, kind, case in cases(options, dtype, compiling=True):
            for tile in TILES[kind][options.compile :: n_compilers]:
                case.run(Tile(*tile), 1)
        return
    compilers = [
        subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--compile", str(i)]) for i in range(n_compilers)
    ]
    for compiler in compilers:
        compiler.wait()
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target = torch.empty_like(source)
    target.copy_(source)
    start.record()
    target.copy_(source)
    end.record()
    end.synchronize()
    bandwidth = 2 * source.numel() / (start.elapsed_time(end) * 1e-3)
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e9:.0f} GB/s")
    rows = []
    for shape, kind, case in cases(options, dtype, compiling=False):
        tiles = TILES[kind]
        if case.name == "gated":  # which takes two rows, or a panel, whatever the tile says
            tiles = list({tile[1:]: tile for tile in tiles}.values())
        took = {tile: case.microseconds(Tile(*tile)) for tile in tiles}
        ranked = sorted(took, key=took.__getitem__)
        rows.append({"shape": shape, "kind": kind, "product": case.name, "us": {str(t): took[t] for t in ranked}})
        share = case.nbytes / bandwidth * 1e6
        line = ", ".join(f"{'/'.join(map(str, t))} {took[t]:.1f}" for t in ranked)
        print(f"{shape:13s} {kind:2d} {case.name:6s} limit {share:6.1f} us: {line}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
