"""Every family through the one Transformer equals transformers, in float32, within 1e-4 of the largest logit."""

from __future__ import annotations

import pytest
import torch

from labkit.checkpoint.translate import supported
from labkit.kvcache.contiguous import ContiguousCache
from labkit.kvcache.none import NoCache
from labkit.model import Transformer
from tests.model.families import VARIANTS, WINDOW, close, pair, token_ids

pytest.importorskip("transformers", reason="transformers is the oracle")
every_variant = pytest.mark.parametrize("name", VARIANTS)

N_TOKENS = 3 * WINDOW  # past the window, and past the context that the scaled variants were trained on
STRETCHED = {"phi3-longrope"}  # frequencies go by the length a sequence may reach: see test_rope


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def cache_of(kind, ours: Transformer, capacity_tokens: int = N_TOKENS, n_sequences: int = 1):
    return kind(ours.cache_entries, capacity_tokens=capacity_tokens, n_sequences=n_sequences)


@every_variant
def test_prefill(name):
    theirs, ours = pair(name)
    ids = token_ids(N_TOKENS)
    close(ours(ids, cache_of(NoCache, ours)), theirs(ids[None]).logits[0])


@every_variant
def test_prefill_of_a_cache_gives_the_last_logits(name):
    theirs, ours = pair(name)
    ids = token_ids(N_TOKENS)
    close(ours(ids, cache_of(ContiguousCache, ours), rows="last"), theirs(ids[None]).logits[0, -1:])


@every_variant
def test_decode_with_cache(name):
    theirs, ours = pair(name)
    ids = token_ids(N_TOKENS)
    n_prompt = 17 if name in STRETCHED else 5
    cache, past, got, want = cache_of(ContiguousCache, ours), None, [], []
    for chunk in (ids[:n_prompt], *ids[n_prompt:].split(1)):
        got.append(ours(chunk, cache))
        out = theirs(chunk[None], cache=past, use_cache=True)
        past = out.past_key_values
        want.append(out.logits[0])
    close(torch.cat(got), torch.cat(want))


@every_variant
def test_chunks_of_a_prompt_equal_the_whole(name):
    theirs, ours = pair(name)
    ids = token_ids(N_TOKENS)
    cache = cache_of(ContiguousCache, ours)
    got = torch.cat([ours(chunk, cache) for chunk in ids.split(7)])
    close(got, theirs(ids[None]).logits[0])


@every_variant
def test_ragged_batch_equals_a_left_padded_one(name):
    """Three sequences in one flat step, then one more token each, against transformers' padded batch."""
    theirs, ours = pair(name)
    lengths = (N_TOKENS - 1, N_TOKENS - 5, 18) if name in STRETCHED else (N_TOKENS - 1, 4, WINDOW + 3)
    rows = [token_ids(n + 1, seed=n) for n in lengths]
    width = max(lengths)
    padded = torch.stack(
        [torch.cat((torch.zeros(width - n, dtype=torch.int64), r)) for n, r in zip(lengths, rows, strict=True)]
    )
    mask = torch.stack([torch.arange(width + 1) >= width - n for n in lengths]).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    first = theirs(padded[:, :width], attention_mask=mask[:, :width], position_ids=positions[:, :width], use_cache=True)
    second = theirs(
        padded[:, width:], attention_mask=mask, position_ids=positions[:, width:], cache=first.past_key_values
    )

    cache = cache_of(ContiguousCache, ours, n_sequences=len(rows))
    flat = torch.cat([row[:-1] for row in rows])
    prefill = ours(flat, cache, counts=dict(enumerate(lengths)))
    decode = ours(torch.stack([row[-1] for row in rows]), cache, counts=dict.fromkeys(range(len(rows)), 1))
    for i, (part, n) in enumerate(zip(prefill.split(lengths), lengths, strict=True)):
        close(part, first.logits[i, width - n :])
    close(decode, second.logits[:, -1])


def test_some_variant_of_every_supported_family_is_here():
    own = {"v4_hybrid"}  # labkit's own mixture of V4's layers: test_compressed has each of them
    assert {family for family, _ in VARIANTS.values()} == set(supported()) - own
