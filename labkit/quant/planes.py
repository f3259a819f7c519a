"""Codes of 2 to 8 bits as bytes: a code is cut into planes of 8, 4, 2 or 1 bits, and each plane is packed by itself.

    8: one byte a code      6: a nibble and 2 bits      5: a nibble and 1 bit      4: a nibble
    3: 2 bits and 1 bit     2: 2 bits

A row's inputs are cut into blocks of 32. In a plane of p bits a block takes 4 p bytes, and byte j holds the codes of
inputs j, j + 4 p, j + 8 p, ... from the low bits up: one mask gives neighbours, as in ggml's Q4_0. No bit is lost to
padding within a block, so 3 bits really are 3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32
PLANES: dict[int, tuple[int, ...]] = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}
"""Bits of a code to its planes, the low bits first."""


def row_nbytes(n_in: int, bits: int) -> int:
    """Bytes of one row of ``n_in`` codes.

    >>> row_nbytes(576, 3), row_nbytes(576, 4)
    (216, 288)
    """
    return -(-n_in // BLOCK) * BLOCK * bits // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """codes uint8 (N, K) below 2^bits -> (N, ``row_nbytes``) uint8: the planes of a row one after the other."""
    blocks = F.pad(codes, (0, -codes.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))  # (N, blocks, 32)
    parts, shift = [], 0
    for width in PLANES[bits]:
        plane = (blocks >> shift) & (2**width - 1)
        turns = plane.unflatten(-1, (8 // width, 4 * width))  # (N, blocks, i, j)
        packed = torch.zeros_like(turns[:, :, 0])
        for i in range(8 // width):
            packed |= turns[:, :, i] << (i * width)
        parts.append(packed.flatten(1))
        shift += width
    return torch.cat(parts, dim=1)


def unpack(packed: Tensor, n_in: int, bits: int) -> Tensor:
    """The inverse of ``pack``: codes uint8 (N, K)."""
    n_blocks = -(-n_in // BLOCK)
    codes = torch.zeros((len(packed), n_blocks, BLOCK), dtype=torch.uint8, device=packed.device)
    at, shift = 0, 0
    for width in PLANES[bits]:
        size = n_blocks * 4 * width
        plane = packed[:, at : at + size].unflatten(1, (n_blocks, 4 * width))
        turns = codes.unflatten(-1, (8 // width, 4 * width))
        for i in range(8 // width):
            turns[:, :, i] |= ((plane >> (i * width)) & (2**width - 1)) << shift
        at, shift = at + size, shift + width
    return codes.flatten(1)[:, :n_in]
