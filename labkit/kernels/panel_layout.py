"""Weights of 2 to 8 bits as the compiled products of a CPU read them: panels of 16 rows, outputs in the lanes.

    w[n, k] = s[n, g] code[n, k] + m[n, g]            g = k / group

One layout for every number of bits, whoever chose the codes (round to nearest, GPTQ, a file's own blocks). For each
8 inputs a panel holds a unit of 16 x bits bytes, planes of 4, 2 and 1 bits one after the other (``PLANES``):

    8 bits    two words of 64 bytes: four inputs of each of the 16 rows, signed
    4 bits    one word of 64 bytes: byte i of a row is input i, and input 4 + i in its high half
    2 bits    a 16-bit number a row: inputs ``ORDER``, from the low bits up
    1 bit     a byte a row: the same order

so that a mask (and a shift) gives 16-bit numbers in pairs that one multiply-add takes. Scales and minima lie group by
group, those of 16 rows beside each other. Rows and inputs are padded to whole panels and blocks with weights of zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 16
"""Output rows of a panel."""
BLOCK = 64
"""Inputs are padded to whole blocks of this many; activations of a block share a step."""
UNIT = 8
"""Inputs whose codes lie together."""
WEIGHT_OFFSET = 128
"""What is added to weights in bytes where an instruction wants them without sign: their sign bit is turned round."""
PLANES: dict[int, tuple[int, ...]] = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}
"""Bits of a code to its planes, the low bits first."""
ORDER = (0, 1, 4, 5, 2, 3, 6, 7)
"""Inputs of a unit in the planes of 2 bits and 1: first the even lanes of the four vectors, then the odd ones."""
GROUPS = (16, 32, 64, 128, 256)
"""Inputs that may share a scale; all of a row's may too."""


@dataclass(frozen=True)
class Panels:
    """A matrix (N, K) as panels. codes uint8 (P, K' / 8, 16 bits), scales and minima (P, G, 16).

    scales float16 or float32; minima None, float16 or float32, or uint8: zero points z, the minimum is -z s. Without
    minima it is -``zero`` s. ``group``: inputs that share a scale, 0 for all of a row's."""

    n_out: int
    n_in: int
    bits: int
    group: int
    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None
    zero: int = 0

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.itemsize for t in (self.codes, self.scales, self.minima) if t is not None)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` of the matrix, float32 (len(ids), K)."""
        panels, inverse = torch.unique(ids // ROWS, return_inverse=True)
        minima = None if self.minima is None else self.minima[panels]
        some = Panels(len(panels) * ROWS, self.n_in, self.bits, self.group, self.codes[panels], self.scales[panels],
                      minima, self.zero)  # fmt: skip
        return some.dequantize()[inverse * ROWS + ids % ROWS]

    def dequantize(self) -> Tensor:
        """float32 (N, K)."""
        codes = _unpack(self.codes, self.bits).float()[: self.n_out]  # (N, K')
        s = self._a_row(self.scales)
        if self.minima is None:
            return ((codes - self.zero) * s)[:, : self.n_in]
        m = self._a_row(self.minima)
        return ((codes - m) * s if self.minima.dtype == torch.uint8 else codes * s + m)[:, : self.n_in]

    def _a_row(self, values: Tensor) -> Tensor:
        """(P, G, 16) as float32 that fit the codes: (N, K') or (N, 1)."""
        rows = values.transpose(1, 2).flatten(0, 1)[: self.n_out].float()
        return rows.repeat_interleave(self.group, dim=1)[:, : self.codes.shape[1] * UNIT] if self.group else rows


def why_not(bits: int, n_in: int, group: int) -> str | None:
    """Why such weights have no panels; None when they have."""
    if bits not in PLANES:
        return f"{bits} bits a weight have no compiled product ({', '.join(map(str, PLANES))} have)."
    if group != n_in and group not in GROUPS:
        return f"groups of {group} have no compiled product ({', '.join(map(str, GROUPS))}, or a row, have)."
    return None


def pack(
    codes: Tensor, scales: Tensor, *, bits: int, zeros: Tensor | None = None, minima: Tensor | None = None
) -> Panels:
    """codes (N, K) uint8 below 2^bits, scales (N, G) and zeros or minima (N, G) or None -> ``Panels``. With neither,
    the zero point is 2^(bits - 1). Nothing is rounded: float32 scales that float16 holds exactly become float16.

    Raises ValueError for bits or groups without a layout."""
    n_out, n_in = codes.shape
    group = n_in // scales.shape[1]
    if (reason := why_not(bits, n_in, group)) is not None:
        raise ValueError(reason)
    if bits == 8 and zeros is None and minima is None:
        codes, zero = codes ^ 128, 0  # signed bytes as they are
    else:
        zero = 2 ** (bits - 1) if zeros is None and minima is None else 0
        codes = codes ^ 128 if bits == 8 else codes
        if bits == 8:  # code - 128 is stored: w = s (code - 128) + (m + 128 s)
            minima = (
                scales.float() * (128.0 - zeros.float())
                if minima is None and zeros is not None
                else (minima.float() + 128.0 * scales.float() if minima is not None else None)
            )
            zeros = None
    n_groups = 1 if group == n_in else -(-_whole(n_in) // group)
    offsets = zeros if zeros is not None else minima
    return Panels(
        n_out, n_in, bits, 0 if group == n_in else group, _pack(codes, bits), _beside(_short(scales), n_groups),
        None if offsets is None else _beside(offsets if zeros is not None else _short(offsets), n_groups), zero,
    )  # fmt: skip


def pack_int8(q: Tensor, scales: Tensor, *, offset: bool = False) -> Panels:
    """q int8 (N, K), scales float32 (N,), one a row. ``offset``: 128 is added, and rounded bytes take it off again."""
    codes = q.contiguous().view(torch.uint8)
    codes = _pack(codes, 8)
    if offset:
        codes ^= 128
    return Panels(q.shape[0], q.shape[1], 8, 0, codes, _beside(scales.float()[:, None], 1))


def _whole(n_in: int) -> int:
    return -(-n_in // BLOCK) * BLOCK


def _short(values: Tensor) -> Tensor:
    """In float16 where that holds every value exactly."""
    if values.dtype == torch.float16:
        return values
    half = values.to(torch.float16)
    return half if torch.equal(half.float(), values.float()) else values.float()


def _beside(values: Tensor, n_groups: int) -> Tensor:
    """(N, G) -> (P, n_groups, 16), padded with zeros."""
    values = F.pad(values, (0, n_groups - values.shape[1], 0, -values.shape[0] % ROWS))
    return values.unflatten(0, (-1, ROWS)).transpose(1, 2).contiguous()


def _pack(codes: Tensor, bits: int) -> Tensor:
    """(N, K) uint8 -> (P, K' / 8, 16 bits)."""
    n_out, n_in = codes.shape
    codes = F.pad(codes, (0, _whole(n_in) - n_in, 0, -n_out % ROWS))
    units = codes.view(-1, ROWS, codes.shape[1] // UNIT, UNIT)  # (P, r, u, input)
    parts, shift = [], 0
    for width in PLANES[bits]:
        plane = units if width == 8 else (units >> shift) & (2**width - 1)
        if width == 8:
            halves = plane.contiguous().view(torch.int32)  # (P, r, u, 2): four inputs each
            parts.append(halves.permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2))
        elif width == 4:
            words = (plane[..., :4] | plane[..., 4:] << 4).contiguous().view(torch.int32)  # (P, r, u, 1)
            parts.append(words[..., 0].transpose(1, 2).contiguous().view(torch.uint8))
        else:
            packed = torch.zeros((*plane.shape[:3], width), dtype=torch.uint8)
            for i, at in enumerate(ORDER):
                packed[..., i * width // 8] |= plane[..., at] << (i * width % 8)
            parts.append(packed.transpose(1, 2).flatten(2))
        shift += width
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of ``_pack``: (N', K'); signed where there are 8 bits."""
    n_panels, n_units, _ = packed.shape
    codes = torch.zeros((n_panels, n_units, ROWS, UNIT), dtype=torch.uint8)
    at, shift = 0, 0
    for width in PLANES[bits]:
        plane = packed[..., at : at + 2 * ROWS * width * UNIT // 16]
        if width == 8:
            codes = plane.unflatten(2, (2, ROWS, 4)).transpose(2, 3).flatten(3)
        elif width == 4:
            words = plane.unflatten(2, (ROWS, 4))
            codes[..., :4], codes[..., 4:] = words & 15, words >> 4
        else:
            bytes_ = plane.unflatten(2, (ROWS, width))
            for i, k in enumerate(ORDER):
                codes[..., k] |= ((bytes_[..., i * width // 8] >> (i * width % 8)) & (2**width - 1)) << shift
        at, shift = at + plane.shape[2], shift + width
    codes = codes.transpose(1, 2).reshape(n_panels * ROWS, -1)
    return codes.view(torch.int8) if bits == 8 else codes
