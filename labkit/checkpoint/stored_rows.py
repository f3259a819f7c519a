"""A matrix on its way from a file to a model, still packed: what may be done to it is done to whole rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.model.transformer import Transformer
from labkit.quant import PackedEmbedding, Stored, StoredLinear
from labkit.quant.blocks import dequantize, not_finite
from labkit.quant.format import KEPT, replace
from labkit.quant.stored import PLAIN


@dataclass(frozen=True)
class StoredRows:
    """Rows of ggml blocks: ``raw`` (N, bytes of a row) uint8 in the format ``kind``, for ``n_in`` inputs.

    It answers to what renaming does to tensors: it can be cut, and its rows can change places.
    """

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
        return StoredRows(self.kind, self.raw[order], self.n_in)


def can_hold(transformer: Transformer, key: str) -> bool:
    """Whether the weight ``key`` may stay packed: a linear's that a format packs, or the embedding's."""
    name, _, kind = key.rpartition(".")
    if kind != "weight":
        return False
    packs = isinstance(transformer.get_submodule(name), nn.Linear) and name.rpartition(".")[2] not in KEPT
    return packs or name == "embedding"


def put_in(
    transformer: Any, packed: dict[str, StoredRows], *, name: str, device: torch.device, dtype: torch.dtype
) -> set[str]:
    """Packed linears in the place of the plain ones that ``packed`` names; a tied head shares the embedding's.

    Returns the names of what they hold. Raises ValueError where a block's scale is NaN or infinite."""
    bad = [key for key, rows in packed.items() if not_finite(rows.raw, rows.kind)]
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
        linear = StoredLinear(rows.kind, rows.raw.to(device), rows.n_in, bias)
        if module_name != "embedding":
            replace(transformer, module_name, linear)
            continue
        if transformer.head is None:
            transformer.head = linear
        transformer.embedding = PackedEmbedding(linear, dtype)
    return {f"{at}.weight" for at, module in transformer.named_modules(remove_duplicate=False) if holds(module)}


def holds(module: Any) -> bool:
    """Whether this is a packed linear, or the embedding that looks its rows up."""
    return isinstance(module, StoredLinear | PackedEmbedding)


def stored_format(transformer: Transformer) -> Stored | None:
    """How a model that was read as stored holds its weights; None when nothing in its file was packed."""
    kinds = {
        f"layers.{at}": module.kind if isinstance(module, StoredLinear) else PLAIN
        for at, module in transformer.layers.named_modules()
        if isinstance(module, StoredLinear | nn.Linear) and at.rpartition(".")[2] not in KEPT
    }
    head, table = transformer.head, getattr(transformer.embedding, "head", None)
    head_kind = head.kind if isinstance(head, StoredLinear) else PLAIN
    if head_kind == PLAIN and table is None and set(kinds.values()) <= {PLAIN}:
        return None
    most = Counter(kinds.values()).most_common(1)[0][0]
    others = tuple((at, kind) for at, kind in kinds.items() if kind != most)
    return Stored(most, head_kind, PLAIN if table is None or table is head else table.kind, others)
