"""Merging many words at once on the device: one row a word, and in each round every row makes its next merge.

A round finds the lowest rank of each row (the left-most of equals), joins that pair, closes the gap and looks up the
two pairs that are new. Rows that have no pair left drop out. The result is that of the word-by-word rule, because rows
never touch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.tokenizer.merge_table import EMPTY, MergeTable

_NO_RANK = 0x7FFFFFFF


@dataclass(frozen=True)
class DeviceTable:
    """A merge table as tensors: sorted for the rounds, and as the hash table for the Triton kernel."""

    keys: Tensor  # int64 (n_merges,), ascending: left << 32 | right
    ranks: Tensor  # int32 (n_merges,)
    joined: Tensor  # int32 (n_merges,)
    byte_ids: Tensor  # int32 (256,)
    slot_keys: Tensor  # int64 (n_slots,)
    slot_ranks: Tensor  # int32 (n_slots,)
    slot_joined: Tensor  # int32 (n_slots,)

    @classmethod
    def build(cls, table: MergeTable, device: torch.device) -> DeviceTable:
        def tensor(array) -> Tensor:
            return torch.from_numpy(array).to(device)

        keys, ranks, joined = tensor(table.keys), tensor(table.ranks), tensor(table.joined)
        used = torch.nonzero(keys != EMPTY).squeeze(1)
        used = used[torch.argsort(keys[used])]
        return cls(keys[used], ranks[used], joined[used], tensor(table.byte_ids), keys, ranks, joined)

    def look_up(self, left: Tensor, right: Tensor) -> Tensor:
        """Index of each pair among the merges, or -1; `left` and `right` are ids of one shape, negative where
        absent."""
        if not len(self.keys):
            return torch.full_like(left, -1, dtype=torch.int64)
        wanted = left.long() << 32 | right.long()
        at = torch.searchsorted(self.keys, wanted).clamp(max=len(self.keys) - 1)
        return torch.where((self.keys[at] == wanted) & (left >= 0) & (right >= 0), at, -1)


def merge_rows(ids: Tensor, lengths: Tensor, table: DeviceTable) -> tuple[Tensor, Tensor]:
    """Merge each row of `ids`, int32 (n_words, width), negative behind a row's length; returns (ids, lengths)."""
    ids, lengths = ids.clone(), lengths.clone()
    rows = torch.arange(len(ids), device=ids.device)
    work = ids
    found = table.look_up(work[:, :-1], work[:, 1:])  # (n_rows, width - 1)
    columns = torch.arange(ids.shape[1], device=ids.device)
    while len(rows) and work.shape[1] > 1:
        ranks = torch.where(found >= 0, table.ranks[found.clamp(min=0)], _NO_RANK)
        lowest, column = ranks.min(dim=1)
        column = torch.where(ranks == lowest[:, None], columns[:-1], len(columns)).amin(
            dim=1
        )  # the left-most of equals
        going = lowest < _NO_RANK
        if not bool(going.all()):
            done = ~going
            ids[rows[done]] = work[done]
            rows, work, found, column = rows[going], work[going], found[going], column[going]
            if not len(rows):
                break
        each = torch.arange(len(rows), device=ids.device)
        made = table.joined[found[each, column]]
        lengths[rows] -= 1
        # Close the gap: every column behind the merged pair moves one to the left.
        source = (columns + (columns > column[:, None])).clamp(max=len(columns) - 1)
        work = work.gather(1, source)
        work[:, -1] = -1
        work[each, column] = made
        found = found.gather(1, source[:, :-1].clamp(max=found.shape[1] - 1))
        found[:, -1] = -1  # its right part has just gone
        found[each, column] = table.look_up(made, work[each, column + 1])
        has_left = column > 0
        left = column[has_left] - 1
        found[each[has_left], left] = table.look_up(work[each[has_left], left], made[has_left])
    if len(rows):
        ids[rows] = work
    return ids, lengths
