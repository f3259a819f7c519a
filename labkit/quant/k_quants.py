"""ggml's K-quants: blocks of 256 values in 8 or 16 sub-blocks, whose scales are themselves quantised.

    Q4_K, Q5_K    w = (d s) q - (d_min m)     8 sub-blocks of 32; s and m in 6 bits each
    Q6_K          w = (d s) (q - 32)          16 sub-blocks of 16; s in 8 bits

The rarer Q2_K and Q3_K are left to the ``gguf`` package.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def half(blocks: Tensor, column: int) -> Tensor:
    """The float16 at byte ``column`` of each block, as float32 (n, 1)."""
    return blocks[:, column : column + 2].contiguous().view(torch.float16).float()


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes to 8 scales and 8 minima of 6 bits (n, 8): four whole in the low bits, four in pieces."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([a & 63, (c & 15) | (a >> 6) << 4], dim=1)
    minima = torch.cat([b & 63, (c >> 4) | (b >> 6) << 4], dim=1)
    return scales.float(), minima.float()


def scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K blocks: d s and -d_min m of each sub-block, float32 (n, 8)."""
    scales, minima = _six_bits(blocks[:, 4:16])
    return half(blocks, 0) * scales, -(half(blocks, 2) * minima)


def nibbles(packed: Tensor) -> Tensor:
    """128 bytes to 8 sub-blocks of 32 codes (n, 8, 32): low nibbles of 32 bytes, then their high nibbles."""
    groups = packed.contiguous().view(-1, 4, 32)
    return torch.stack((groups & 15, groups >> 4), dim=2).view(-1, 8, 32)


def _scaled(codes: Tensor, blocks: Tensor, out: Tensor) -> None:
    step, offset = scales_and_minima(blocks)  # (n, 8)
    out.unflatten(1, (8, 32)).copy_(codes.float().mul_(step.unsqueeze(-1)).add_(offset.unsqueeze(-1)))


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    _scaled(nibbles(blocks[:, 16:144]), blocks, out)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    fifth = (blocks[:, 16:48].unsqueeze(1) >> shifts & 1) << 4  # (n, 8, 32): bit j belongs to sub-block j
    _scaled(nibbles(blocks[:, 48:176]) | fifth, blocks, out)


def codes_of_q6(blocks: Tensor) -> Tensor:
    """The codes 0..63 of Q6_K blocks (n, 16, 16): four low bits in nibbles, two high ones apart."""
    low = blocks[:, :128].unflatten(1, (2, 1, 64))
    low = torch.cat([low & 15, low >> 4], dim=2).view(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    high = (blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts & 3) << 4  # (n, 2, 4, 32)
    return (low | high).view(-1, 16, 16)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    q = codes_of_q6(blocks).float().sub_(32)
    scales = half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()  # (n, 16)
    out.unflatten(1, (16, 16)).copy_(q.mul_(scales.unsqueeze(-1)))


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
