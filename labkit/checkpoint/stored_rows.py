"""A matrix on its way from a file to a model, still packed: what may be done to it is done to whole rows.

``StoredRows`` are a GGUF file's blocks, ``GroupRows`` what GPTQ, AWQ and compressed-tensors files hold. Both answer to
what renaming does to tensors: they can be cut, and their rows can change places.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.model.transformer import Transformer
from labkit.quant import (
    GroupLinear,
    Groups,
    Int4Linear,
    Packed,
    PackedEmbedding,
    PackedLinear,
    Stored,
    StoredLinear,
    WeightFormat,
)
from labkit.quant.blocks import dequantize, not_finite
from labkit.quant.format import KEPT, replace
from labkit.quant.grouped import linear_of
from labkit.quant.stored import PLAIN


@dataclass(frozen=True)
class StoredRows:
    """Rows of ggml blocks: ``raw`` (N, bytes of a row) uint8 in the format ``kind``, for ``n_in`` inputs."""

    kind: str
    raw: Tensor
    n_in: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.raw), self.n_in

    @property
    def ndim(self) -> int:
        return 2

    def unpack(self, dtype: torch.dtype) -> Tensor:
        return dequantize(self.raw.contiguous().view(-1), self.kind, self.shape, dtype)

    def split(self, sizes: list[int]) -> list[StoredRows]:
        """Cut along the rows."""
        return [StoredRows(self.kind, part, self.n_in) for part in self.raw.split(sizes)]

    def __getitem__(self, order: Tensor) -> StoredRows:
        """The rows ``order``."""
        return StoredRows(self.kind, torch.from_numpy(self.raw.numpy()[order.numpy()]), self.n_in)  # on one thread

    def linear(self, bias: Tensor | None, device: torch.device) -> PackedLinear:
        return StoredLinear(self.kind, self.raw.to(device), self.n_in, bias)

    @property
    def is_finite(self) -> bool:
        return not not_finite(self.raw, self.kind)


@dataclass(frozen=True)
class GroupRows:
    """Rows of codes on grids of groups; ``order`` as in ``GroupLinear``."""

    groups: Groups
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        n_out, n_in = self.groups.codes.shape
        return n_out, n_in

    @property
    def ndim(self) -> int:
        return 2

    def unpack(self, dtype: torch.dtype) -> Tensor:
        return GroupLinear(self.groups, order=self.order).dequantize().to(dtype)

    def split(self, sizes: list[int]) -> list[GroupRows]:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [self[torch.arange(at, at + n)] for at, n in zip(starts, sizes, strict=True)]

    def __getitem__(self, order: Tensor) -> GroupRows:
        return GroupRows(self.groups.rows(order), self.order)

    def linear(self, bias: Tensor | None, device: torch.device) -> PackedLinear:
        return linear_of(self.groups, bias, order=self.order).to(device)

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.groups.scales).all())


Rows = StoredRows | GroupRows


def can_hold(transformer: Transformer, key: str) -> bool:
    """Whether the weight ``key`` may stay packed: a linear's that a format packs, or the embedding's."""
    name, _, kind = key.rpartition(".")
    if kind != "weight":
        return False
    packs = isinstance(transformer.get_submodule(name), nn.Linear) and name.rpartition(".")[2] not in KEPT
    return packs or name == "embedding"


def put_in(
    transformer: Any, packed: dict[str, Rows], *, name: str, device: torch.device, dtype: torch.dtype
) -> set[str]:
    """Packed linears in the place of the plain ones that ``packed`` names; a tied head shares the embedding's.

    Returns the names of what they hold. Raises ValueError where a block's scale is NaN or infinite."""
    bad = [key for key, rows in packed.items() if not rows.is_finite]
    if bad:
        raise ValueError(
            f"{name}: {len(bad)} packed tensors have scales that are NaN or infinite: {', '.join(bad[:6])}"
            f"{', ...' if len(bad) > 6 else ''}. The file is damaged."
        )
    for key, rows in packed.items():
        module_name = key.removesuffix(".weight")
        old = transformer.get_submodule(module_name)
        bias = getattr(old, "bias", None)
        bias = None if bias is None else torch.empty_like(bias, device="meta", dtype=dtype)
        linear = rows.linear(bias, device)
        if module_name != "embedding":
            replace(transformer, module_name, linear)
            continue
        if transformer.head is None:
            transformer.head = linear
        transformer.embedding = PackedEmbedding(linear, dtype)
    # names that a plain model of this shape has no tensors for any more
    held = [
        at
        for at, module in transformer.named_modules(remove_duplicate=False)
        if isinstance(module, PackedLinear | PackedEmbedding)
    ]
    return {name for name in transformer.state_dict() if name.rpartition(".")[0] in held}


def held_format(transformer: Any) -> WeightFormat | None:
    """How a model that was read as it is packed holds its weights; None when nothing in its file was packed."""
    linears = {
        f"layers.{at}": module
        for at, module in transformer.layers.named_modules()
        if isinstance(module, PackedLinear | nn.Linear) and at.rpartition(".")[2] not in KEPT
    }
    brought = [m for m in linears.values() if isinstance(m, GroupLinear | Int4Linear)]
    if brought:
        return _packed_format(brought)
    kinds = {at: module.kind if isinstance(module, StoredLinear) else PLAIN for at, module in linears.items()}
    head, table = transformer.head, getattr(transformer.embedding, "head", None)
    head_kind = head.kind if isinstance(head, StoredLinear) else PLAIN
    if head_kind == PLAIN and table is None and set(kinds.values()) <= {PLAIN}:
        return None
    most = Counter(kinds.values()).most_common(1)[0][0]
    others = tuple((at, kind) for at, kind in kinds.items() if kind != most)
    return Stored(most, head_kind, PLAIN if table is None or table is head else table.kind, others)


def _packed_format(linears: list[GroupLinear | Int4Linear]) -> Packed:
    first = linears[0]
    whole = all(m.group_size == m.in_features for m in linears)
    ordered = any(getattr(m, "order", None) is not None for m in linears)
    kind = "symmetric" if all(m.zeros is None for m in linears) else "asymmetric"
    return Packed(getattr(first, "bits", 4), 0 if whole else first.group_size, kind, ordered)
