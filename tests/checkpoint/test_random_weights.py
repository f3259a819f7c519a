"""Random weights in real shapes: the published parameter counts, and an answer before what does not fit."""

from __future__ import annotations

import pytest
import torch

import labkit
from labkit.checkpoint import placement
from labkit.checkpoint.assemble import skeleton
from labkit.checkpoint.catalogue import catalogue
from labkit.checkpoint.translate import config_from_hf


def loaded(name, **options):
    return labkit.load(name, **{"device": "cpu", "dtype": "fp32", **options})


PUBLISHED_PARAMETERS = {  # as the model cards and safetensors indices of the real models give them
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "gpt2": 124_439_808,
    "qwen3-0.6b": 596_049_920,
    "gemma-3-1b": 999_885_952,
    "llama-3.2-1b": 1_235_814_400,
    "phi-3-mini": 3_821_079_552,
    "llama-2-7b": 6_738_415_616,
    "mistral-7b": 7_241_732_096,
    "llama-3-8b": 8_030_261_248,
    "llama-2-13b": 13_015_864_320,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_random_shapes_have_the_published_number_of_parameters(name):
    config = config_from_hf(catalogue()["random"][name])
    assert sum(p.numel() for p in skeleton(config, name).parameters()) == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", [name for name in labkit.models() if name.startswith("random:tiny-")])
def test_tiny_random_models_run(name):
    model = loaded(name)
    ids = model.tokenizer.encode("héllo")
    assert len(ids) == 6
    assert max(ids) < 256
    logits = model(ids)
    assert logits.shape == (6, model.config.vocab_size)
    assert torch.isfinite(logits).all()
    assert torch.equal(logits, loaded(name)(ids))  # the same numbers every time
    assert model.tokenizer.decode([*ids, 400]).startswith("héllo")


def test_random_weights_have_the_stated_spread():
    state = loaded("random:tiny-llama").transformer.state_dict()
    assert state["embedding.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert (state["final_norm.weight"] == 1).all()


def test_what_does_not_fit_is_said_before_allocating(monkeypatch):
    monkeypatch.setattr(placement, "free_bytes", lambda _: 20 * 10**9)
    monkeypatch.setattr(torch.nn.Module, "to_empty", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(ValueError, match=r"6\.74 billion weights: 27\.2 GB in fp32.*dtype='bf16' \(13\.5 GB\)"):
        loaded("random:llama-2-7b")
    with pytest.raises(ValueError, match=r"What fits: a smaller model"):
        loaded("random:llama-2-13b", dtype="bf16")


def test_free_memory_is_a_plausible_number():
    assert 2**20 < placement.free_bytes(torch.device("cpu")) < 2**50
