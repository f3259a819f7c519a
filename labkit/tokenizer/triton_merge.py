"""Merging many words at once in one Triton kernel: one lane a word, and the whole merge loop inside the kernel.

The rounds of :mod:`labkit.tokenizer.device_merge` launch some twenty operations a round over the whole matrix; here a
lane goes through its own word: find the lowest rank, join, close the gap, look up the two new pairs, until no pair is
left. Symbols are stored column-major, so that the lanes of a program read neighbouring words. Importing this module
needs Triton.
"""

# Triton's language is Python to the parser only: its types are not what a type checker can follow.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.tokenizer.device_merge import DeviceTable

_MULTIPLIER = -7046029254386353131  # as in merge_table.first_slot
_LANES = 128


@triton.jit
def _find(left, right, wanted, keys, n_slots, multiplier):
    """Slot of the pair (left, right) in the hash table for the lanes that want it, else -1."""
    key = (left.to(tl.int64) << 32) | right.to(tl.int64)
    slot = ((key * multiplier) >> 20) & (n_slots - 1)
    looking = wanted & (left >= 0) & (right >= 0)
    found = tl.full(key.shape, -1, tl.int64)
    while tl.max(looking.to(tl.int32), axis=0) > 0:
        there = tl.load(keys + slot, mask=looking, other=-1)
        hit = looking & (there == key)
        found = tl.where(hit, slot, found)
        looking = looking & (there != key) & (there != -1)
        slot = (slot + 1) & (n_slots - 1)
    return found


@triton.jit
def _merge_kernel(
    symbols, slots, lengths, keys, ranks, joined,
    n_words, n_slots, multiplier,
    WIDTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """symbols: int32, slots: int64, both (WIDTH, n_words); slots[i] is the merge of the pair (i, i + 1), or -1."""
    word = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = word < n_words
    length = tl.load(lengths + word, mask=inside, other=0)
    for i in range(WIDTH - 1):
        pair = inside & (i + 1 < length)
        left = tl.load(symbols + i * n_words + word, mask=pair, other=-1)
        right = tl.load(symbols + (i + 1) * n_words + word, mask=pair, other=-1)
        tl.store(slots + i * n_words + word, _find(left, right, pair, keys, n_slots, multiplier), mask=inside)
    going = inside & (length > 1)
    while tl.max(going.to(tl.int32), axis=0) > 0:
        lowest = tl.full(word.shape, 0x7FFFFFFF, tl.int32)
        best = tl.full(word.shape, -1, tl.int64)
        best_slot = tl.full(word.shape, 0, tl.int64)
        for i in range(WIDTH - 1):
            live = going & (i + 1 < length)
            slot = tl.load(slots + i * n_words + word, mask=live, other=-1)
            rank = tl.load(ranks + slot, mask=live & (slot >= 0), other=0x7FFFFFFF)
            better = rank < lowest
            lowest = tl.where(better, rank, lowest)
            best = tl.where(better, i, best)
            best_slot = tl.where(better, slot, best_slot)
        going = going & (best >= 0)
        made = tl.load(joined + best_slot, mask=going, other=-1)
        tl.store(symbols + best * n_words + word, made, mask=going)
        for i in range(WIDTH - 1):  # close the gap behind the pair
            move = going & (i > best) & (i + 1 < length)
            symbol = tl.load(symbols + (i + 1) * n_words + word, mask=move, other=-1)
            tl.store(symbols + i * n_words + word, symbol, mask=move)
        for i in range(WIDTH - 2):
            move = going & (i > best) & (i + 2 < length)
            slot = tl.load(slots + (i + 1) * n_words + word, mask=move, other=-1)
            tl.store(slots + i * n_words + word, slot, mask=move)
        length = tl.where(going, length - 1, length)
        has_right = going & (best + 1 < length)
        right = tl.load(symbols + (best + 1) * n_words + word, mask=has_right, other=-1)
        tl.store(slots + best * n_words + word, _find(made, right, has_right, keys, n_slots, multiplier), mask=going)
        has_left = going & (best > 0)
        left = tl.load(symbols + (best - 1) * n_words + word, mask=has_left, other=-1)
        slot = _find(left, made, has_left, keys, n_slots, multiplier)
        tl.store(slots + (best - 1) * n_words + word, slot, mask=has_left)
        going = going & (length > 1)
    tl.store(lengths + word, length, mask=inside)


def merge_rows(ids: Tensor, lengths: Tensor, table: DeviceTable) -> tuple[Tensor, Tensor]:
    """As :func:`labkit.tokenizer.device_merge.merge_rows`, in one kernel launch."""
    n_words, width = ids.shape
    symbols = ids.t().contiguous()  # (width, n_words)
    slots = torch.full((max(1, width - 1), n_words), -1, dtype=torch.int64, device=ids.device)
    left = lengths.to(torch.int32).clone()
    _merge_kernel[(triton.cdiv(n_words, _LANES),)](
        symbols, slots, left, table.slot_keys, table.slot_ranks, table.slot_joined,
        n_words, len(table.slot_keys), _MULTIPLIER,
        WIDTH=width, LANES=_LANES,
    )  # fmt: skip
    merged = symbols.t().contiguous()
    columns = torch.arange(width, device=ids.device)
    return merged.masked_fill_(columns >= left[:, None], -1), left.to(lengths.dtype)
