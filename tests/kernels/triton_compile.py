"""Run in a process of its own: every Triton kernel of a step, compiled for a GPU that need not be there.

    python tests/kernels/triton_compile.py 90        compute capability: 75 a T4, 80 an A100, 90 an H100 or H200

Prints each kernel's name once for each of its variants.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from labkit.kernels.triton import attention, chain, elementwise, many, product, sampling, unpack
from labkit.kernels.triton.product import Matrix
from labkit.model.config import Norm
from labkit.model.norm import RMSNorm
from labkit.quant import StoredLinear, blocks, grid
from labkit.quant.linear import Int4Linear, Int8Linear

CAPABILITY = int(sys.argv[1])
DTYPE = torch.bfloat16 if CAPABILITY >= 80 else torch.float16


class AbsentGPU:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self):
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0


compiled = set()
run = JITFunction.run


def only_compile(self, *args, grid, warmup, **options):
    """In place of a launch."""
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    assert kernel.asm["cubin"]
    compiled.add((self.__name__, kernel.hash))
    return kernel


def linears(n_out, n_in):
    weight = torch.randn(n_out, n_in)
    plain = torch.nn.Linear(n_in, n_out, bias=False).to(DTYPE).requires_grad_(False)
    yield plain
    yield Int8Linear(*grid.round_int8(weight))
    yield Int4Linear(*grid.round_int4(weight, 32, symmetric=False))


def main():
    driver.set_active(AbsentGPU())
    JITFunction.run = only_compile
    if CAPABILITY >= 90:
        for module in (attention, product, sampling):
            module.chained = lambda device: {"CHAINED": True, "launch_pdl": True}
    assert chain.chained(torch.device("cpu")) == {"CHAINED": False}
    many.has_bf16 = lambda device: CAPABILITY >= 80
    norm = RMSNorm(576, Norm()).to(DTYPE)
    x, token = torch.empty(576, dtype=DTYPE), torch.zeros(1, dtype=torch.int64)
    for linear in linears(576, 576):
        matrix = Matrix.of(linear)
        product.project(x, [matrix] * 3, torch.empty(3 * 576, dtype=DTYPE), norm=norm)
        product.project(x, [matrix], x, residual=x)
        product.gated(x, matrix, matrix, torch.empty(576, dtype=DTYPE), norm=norm)
        sampling.lookup(matrix, token, x)
        if matrix.kind != 16:
            unpack.unpack(matrix, DTYPE)
    wide_norm, wide, prompt = RMSNorm(768, Norm()).to(DTYPE), torch.empty(768, dtype=DTYPE), torch.empty(20, 768)
    for kind in ("Q4_1", "Q5_0", "Q8_0", "Q5_K", "Q6_K"):  # the others are parts of these
        matrix = Matrix.of(StoredLinear(kind, blocks.anything(kind, 768, 768), 768))
        product.project(wide, [matrix] * 3, torch.empty(3 * 768, dtype=DTYPE), norm=wide_norm)
        product.gated(wide, matrix, matrix, torch.empty(768, dtype=DTYPE), norm=wide_norm)
        sampling.lookup(matrix, token, wide)
        for dtype in {DTYPE, torch.float32} if kind == "Q4_1" else {DTYPE}:
            many.linear(matrix, prompt.to(dtype))
    for n_heads, n_groups, d, capacity in ((9, 3, 64, 200), (32, 32, 128, 2560)):
        scratch = attention.Scratch(n_heads, n_groups, d, capacity, "cpu")
        caches = [torch.empty(n_groups, capacity, d, dtype=DTYPE) for _ in range(2)]
        tables = [torch.empty(capacity, d // 2) for _ in range(2)]
        qkv = torch.empty((n_heads + 2 * n_groups) * d, dtype=DTYPE)
        attention.attend_one(
            qkv, *tables, token, *caches, qkv[: n_heads * d], scratch, n_heads=n_heads, scale=0.1, window=64, n_sinks=4
        )
        q, k, v = (torch.empty(5, n, d, dtype=DTYPE) for n in (n_heads, n_groups, n_groups))
        elementwise.rotate_append(q, k, v, *(table[:5] for table in tables), token.expand(5).contiguous(), *caches)
    prompt = torch.empty(5, 576, dtype=DTYPE)
    elementwise.gate(prompt, elementwise.rms_norm(prompt, norm.weight, 1e-5))
    sampling.Chooser(3000, "cpu")(torch.empty(3000, dtype=DTYPE), token, token, token)
    print(*sorted(name for name, _ in compiled), sep="\n")


if __name__ == "__main__":
    main()
