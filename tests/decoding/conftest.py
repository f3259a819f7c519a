"""A tiny target, and drafters for it."""

from __future__ import annotations

import pytest
import torch

from labkit.decoding import DraftModel, EarlyExit, PromptLookup, Rounded, draft_head
from labkit.decoding.trained_head import HeadDrafter
from labkit.model import Model
from tests.decoding.tiny import N_VOCAB, fill, tiny, with_context


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tensors this small are not worth a second thread, which on a busy machine is waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def target() -> Model:
    return tiny(1)


@pytest.fixture(scope="session")
def head(target) -> draft_head.DraftHead:
    """An untrained draft head over every other id of the target."""
    made = draft_head.DraftHead(target.config, torch.arange(0, N_VOCAB, 2))
    fill(made, 3)
    made.trunk.embedding.weight.data.copy_(target.transformer.embedding.weight[::2])
    return made


@pytest.fixture(scope="session")
def drafters(target, head) -> dict:
    """One of each kind; "draft-model" and "itself" guess badly and perfectly."""
    return {
        "prompt-lookup": PromptLookup(n_draft=4, shortest=1),
        "draft-model": DraftModel(model=tiny(2, n_layers=1), n_draft=3),
        "itself": DraftModel(model=target, n_draft=5),
        "short-context": DraftModel(model=with_context(target, 60), n_draft=4),
        "rounded": Rounded(weights="int8", n_draft=3),
        "early-exit": EarlyExit(share=0.7, n_draft=4),
        "trained-head": HeadDrafter(head, target, 3),
        "automatic": DraftModel(model=target),
    }
