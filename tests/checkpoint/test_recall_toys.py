"""The toys of lesson 12: their task is what it says, their weights are there, and two ways to compute them agree."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from labkit.checkpoint import recall_toys as toys
from labkit.resources import data_path

ROOT = Path(__file__).resolve().parents[2]


def test_every_answer_is_in_the_context():
    tokens, answers = toys.facts(12, 5, torch.Generator().manual_seed(3))
    assert tokens.shape == (5, toys.N_CONTEXT_TOKENS + toys.N_QUESTIONS)
    n_facts = toys.N_KEYS * toys.N_VALUES
    for row, wanted in zip(tokens.tolist(), answers.tolist(), strict=True):
        stated = dict(divmod(token, toys.N_VALUES) for token in row[: toys.N_CONTEXT_TOKENS] if token < n_facts)
        assert len(stated) == 12
        first_answer = toys.VOCABULARY - toys.N_VALUES
        assert [first_answer + stated[q - n_facts] for q in row[toys.N_CONTEXT_TOKENS :]] == wanted


@pytest.mark.parametrize("n_facts", [0, toys.N_KEYS + 1])
def test_more_facts_than_drawers_are_refused(n_facts):
    with pytest.raises(ValueError, match="1 to 32 facts"):
        toys.facts(n_facts, 1, torch.Generator())


def test_the_weights_are_small_and_every_run_is_there():
    files = list(data_path("recall").glob("*.safetensors"))
    assert sum(path.stat().st_size for path in files) < 5_000_000
    assert all(toys.seeds(kind) == list(toys.SEEDS) for kind in toys.KINDS)


def test_a_missing_run_says_how_to_train_it():
    with pytest.raises(FileNotFoundError, match=r"benchmarks/recall\.py --kinds csa"):
        toys.load("csa", 99)


@pytest.mark.parametrize("kind", toys.KINDS)
def test_batches_with_masks_and_labkits_modules_agree(kind):
    """The training script computes attention in its own way: the trained weights give the same logits in both."""
    spec = importlib.util.spec_from_file_location("recall_script", ROOT / "benchmarks" / "recall.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.disagreement(toys.load(kind, toys.seeds(kind)[0]), kind) < 1e-3


def test_one_needle_is_found_by_who_can_see_it():
    """Full attention sees the whole context; a window of 8 before 16 questions next to nothing of it."""
    full, window = (toys.recall(toys.load(kind, toys.seeds(kind)[0]), 1) for kind in ("full", "sliding"))
    assert full > 0.9
    assert window < 0.6
