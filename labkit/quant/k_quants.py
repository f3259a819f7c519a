"""ggml's K-quants: blocks of 256 values in 8 or 16 sub-blocks, whose scales are themselves quantised.

    Q4_K, Q5_K    w = (d s) q - (d_min m)     8 sub-blocks of 32; s and m in 6 bits each
    Q6_K          w = (d s) (q - 32)          16 sub-blocks of 16; s in 8 bits

The rarer Q2_K and Q3_K are left to the ``gguf`` package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.quant.bytes import columns, floats, half, joined, shifts, signed


def _six_bits(packed: Any) -> tuple[Any, Any]:
    """12 bytes to 8 scales and 8 minima of 6 bits (n, 8): four whole in the low bits, four in pieces."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = joined(a & 63, (c & 15) | (a >> 6) << 4)
    minima = joined(b & 63, (c >> 4) | (b >> 6) << 4)
    return floats(scales), floats(minima)


def scales_and_minima(blocks: Any) -> tuple[Any, Any]:
    """Of Q4_K and Q5_K blocks: d s and -d_min m of each sub-block, float32 (n, 8)."""
    scales, minima = _six_bits(blocks[:, 4:16])
    return floats(half(blocks, 0)) * scales, -(floats(half(blocks, 2)) * minima)


def codes_of_q4(blocks: Any, column: int = 16) -> Any:
    """128 bytes of each block, from ``column`` on, to 8 sub-blocks of 32 codes (n, 8, 32): low nibbles of 32 bytes,
    then their high nibbles."""
    groups = columns(blocks, column, column + 128).reshape(-1, 4, 32)
    return joined(groups & 15, groups >> 4).reshape(-1, 8, 32)


def codes_of_q5(blocks: Any) -> Any:
    """The codes 0..31 of Q5_K blocks (n, 8, 32): the fifth bits apart, bit j of 32 bytes for sub-block j."""
    fifth = (columns(blocks, 16, 48).reshape(-1, 1, 32) >> shifts(blocks, 8) & 1) << 4
    return codes_of_q4(blocks, 48) | fifth


def codes_of_q6(blocks: Any) -> Any:
    """The codes 0..63 of Q6_K blocks (n, 16, 16): four low bits in nibbles, two high ones apart."""
    low = columns(blocks, 0, 128).reshape(-1, 2, 64)
    low = joined(low & 15, low >> 4).reshape(-1, 2, 4, 32)
    high = (columns(blocks, 128, 192).reshape(-1, 2, 1, 32) >> shifts(blocks, 8, 2) & 3) << 4  # (n, 2, 4, 32)
    return (low | high).reshape(-1, 16, 16)


def scales_of_q6(blocks: Any) -> Any:
    """d s of each sub-block of Q6_K, float32 (n, 16)."""
    return floats(half(blocks, 208)) * floats(signed(blocks[:, 192:208]))


def _scaled(codes: Tensor, blocks: Tensor, out: Tensor) -> None:
    step, offset = scales_and_minima(blocks)  # (n, 8)
    out.unflatten(1, (8, 32)).copy_(codes.float().mul_(step.unsqueeze(-1)).add_(offset.unsqueeze(-1)))


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    _scaled(codes_of_q4(blocks), blocks, out)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    _scaled(codes_of_q5(blocks), blocks, out)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    q = codes_of_q6(blocks).float().sub_(32)
    out.unflatten(1, (16, 16)).copy_(q.mul_(scales_of_q6(blocks).unsqueeze(-1)))


def _by_package(kind: str) -> Callable[[Tensor, Tensor], None]:
    def dequantize(blocks: Tensor, out: Tensor) -> None:
        import gguf

        out.copy_(torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])))

    return dequantize


K_QUANTS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q2_K": _by_package("Q2_K"),
    "Q3_K": _by_package("Q3_K"),
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
