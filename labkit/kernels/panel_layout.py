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

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
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


def nbytes(n_out: int, n_in: int, *, bits: int, group: int, group_nbytes: int) -> int:
    """Bytes of a matrix as panels, ``group_nbytes`` those of a group's scale and offset. ``group`` 0: all of a row."""
    n_rows, whole = -(-n_out // ROWS) * ROWS, _whole(n_in)
    n_groups = -(-whole // group) if 0 < group < n_in else 1
    return n_rows * (whole * bits // 8 + n_groups * group_nbytes)


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
    numbers, steps = codes.numpy(), _in_numpy(scales)
    z, m = (None if t is None else _in_numpy(t) for t in (zeros, minima))
    zero = 0
    if bits == 8:  # signed bytes, code - 128: w = s (code - 128) + (m + 128 s), a float32
        numbers = numbers ^ 128
        if m is not None:
            m = m.astype(np.float32) + np.float32(128) * steps.astype(np.float32)
        elif z is not None:
            m, z = steps.astype(np.float32) * (np.float32(128) - z.astype(np.float32)), None
    elif z is None and m is None:
        zero = 2 ** (bits - 1)
    n_groups = 1 if group == n_in else -(-_whole(n_in) // group)
    offsets = z if z is not None or m is None else m if bits == 8 else _short(m)
    return Panels(
        n_out, n_in, bits, 0 if group == n_in else group, _pack(numbers, bits), _beside(_short(steps), n_groups),
        None if offsets is None else _beside(offsets, n_groups), zero,
    )  # fmt: skip


def pack_int8(q: Tensor, scales: Tensor, *, offset: bool = False) -> Panels:
    """q int8 (N, K), scales float32 (N,), one a row. ``offset``: 128 is added, and rounded bytes take it off again."""
    codes = _pack(q.numpy().view(np.uint8), 8)
    if offset:
        codes ^= 128
    return Panels(q.shape[0], q.shape[1], 8, 0, codes, _beside(scales.float().numpy()[:, None], 1))


def _in_numpy(values: Tensor) -> np.ndarray:
    """The same numbers; numpy does not know bfloat16, in which some files have their scales."""
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def _whole(n_in: int) -> int:
    return -(-n_in // BLOCK) * BLOCK


def _short(values: np.ndarray) -> np.ndarray:
    """In float16 where that holds every value exactly."""
    if values.dtype == np.float16:
        return values
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    return half if np.array_equal(half, values) else values.astype(np.float32, copy=False)


def _beside(values: np.ndarray, n_groups: int) -> Tensor:
    """(N, G) -> (P, n_groups, 16), padded with zeros."""
    padded = _padded(values, -(-len(values) // ROWS) * ROWS, n_groups)
    return torch.from_numpy(padded.reshape(-1, ROWS, n_groups).swapaxes(1, 2).copy())


def _padded(values: np.ndarray, n_rows: int, n_columns: int) -> np.ndarray:
    """(N, K) with zeros behind it, in rows."""
    if values.shape == (n_rows, n_columns):
        return np.ascontiguousarray(values)
    whole = np.zeros((n_rows, n_columns), values.dtype)
    whole[: values.shape[0], : values.shape[1]] = values
    return whole


def _pack(codes: np.ndarray, bits: int) -> Tensor:
    """(N, K) uint8 -> (P, K' / 8, 16 bits): each plane of a row as numbers, which then stand beside other rows'."""
    n_panels, n_units = -(-codes.shape[0] // ROWS), _whole(codes.shape[1]) // UNIT
    codes = _padded(codes, n_panels * ROWS, n_units * UNIT)
    packed = np.empty((n_panels, n_units, ROWS * bits), np.uint8)
    at, shift = 0, 0
    for width in PLANES[bits]:
        numbers = _PLANE[width](codes, shift)
        numbers = numbers.reshape(n_panels, ROWS, n_units, -1)  # (P, r, u, numbers of a unit)
        into = packed[:, :, at : at + ROWS * width].view(numbers.dtype).reshape(n_panels, n_units, -1, ROWS)
        np.copyto(into, numbers.transpose(0, 2, 3, 1))
        at, shift = at + ROWS * width, shift + width
    return torch.from_numpy(packed)


def _bytes(codes: np.ndarray, shift: int) -> np.ndarray:
    return codes.view("<u4")


def _nibbles(codes: np.ndarray, shift: int) -> np.ndarray:
    fours = codes.view("<u4")
    first, second = fours[:, 0::2] >> np.uint32(shift), fours[:, 1::2] >> np.uint32(shift)
    return (first & np.uint32(0x0F0F0F0F)) | (second & np.uint32(0x0F0F0F0F)) << np.uint32(4)


def _few(codes: np.ndarray, shift: int, width: int) -> np.ndarray:
    """Planes of 1 or 2 bits: input ``ORDER[i]`` of a unit, seen as one number of 64 bits, goes to place i."""
    units = codes.view("<u8")
    found = np.zeros_like(units)
    for i, at in enumerate(ORDER):
        bits, move = np.uint64((2**width - 1) << (width * i)), 8 * at + shift - width * i
        found |= (units >> np.uint64(move) if move > 0 else units << np.uint64(-move)) & bits
    return found.astype("<u2" if width == 2 else "u1")


_PLANE: dict[int, Callable[[np.ndarray, int], np.ndarray]] = {
    8: _bytes,
    4: _nibbles,
    2: partial(_few, width=2),
    1: partial(_few, width=1),
}


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
