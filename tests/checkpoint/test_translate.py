"""The translator against transformers' own tiny models: configs, and every tensor's name and shape."""

from __future__ import annotations

import json

import pytest
import torch

from labkit.checkpoint.translate import config_from_hf, supported, tensors_from_hf

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "llama": {},
    "smollm3": {},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "phi3": {},
    "olmo2": {},
}


def tiny(family: str, **changes):
    """A random transformers model of one family, and its config."""
    config_class = transformers.AutoConfig.for_model(family).__class__
    config = config_class(**{**SMALL, **FAMILIES[family], **changes})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def test_every_family_is_covered_here():
    assert sorted(FAMILIES) == supported()


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_checkpoint_gives_every_tensor_of_the_model(family, tmp_path):
    safetensors_torch = pytest.importorskip("safetensors.torch")
    from labkit.model import Transformer

    model = tiny(family)
    model.save_pretrained(tmp_path)
    config = config_from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert config.family == family
    with torch.device("meta"):
        wanted = {name: tuple(t.shape) for name, t in Transformer(config).state_dict().items()}
    # what is on disk (experts apart, head dropped when tied), and what is in memory (experts stacked)
    for tensors in (safetensors_torch.load_file(tmp_path / "model.safetensors"), model.state_dict()):
        got = {name: tuple(t.shape) for name, t in tensors_from_hf(config, tensors)}
        assert got == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_in_memory_config_equals_the_saved_one(family, tmp_path):
    model = tiny(family)
    model.config.save_pretrained(tmp_path)
    assert config_from_hf(model.config.to_dict()) == config_from_hf(json.loads((tmp_path / "config.json").read_text()))
