"""Every metadata key that changes arithmetic is read, as llama.cpp reads it, or refused by its name."""

from __future__ import annotations

import pytest
import torch

from labkit.checkpoint.translate import config_from_gguf

LLAMA = {
    "general.architecture": "llama",
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES = {"token_embd.weight": (96, 64), "output.weight": (96, 64)}


def config(architecture="llama", **keys):
    metadata = {key.replace("llama", architecture, 1): value for key, value in LLAMA.items()}
    metadata["general.architecture"] = architecture
    metadata |= {f"{architecture}.{key}": value for key, value in keys.items()}
    return config_from_gguf(metadata, SHAPES, lambda _: torch.ones(8))


def scaling(**keys):
    return config(**keys).layers[0].attention.rope.scaling


@pytest.mark.parametrize(
    ("keys", "kind", "factor"),
    [
        ({"rope.scale_linear": 4.0}, "linear", 4.0),
        ({"rope.scaling.factor": 4.0}, "linear", 4.0),  # llama.cpp: the type's default is linear
        ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, "linear", 2.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, "linear", 4.0),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "yarn", 4.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None, None),
        ({"rope.scaling.type": "linear"}, None, None),
        ({"rope.scale_linear": 1.0}, "linear", 1.0),
        ({}, None, None),
    ],
)
def test_scaling_as_llama_cpp_reads_it(keys, kind, factor):
    found = scaling(**keys)
    assert (found and found.kind, found and found.factor) == (kind, factor)


def test_a_window_in_a_llama_file_is_mistrals():
    assert [layer.attention.window for layer in config(**{"attention.sliding_window": 32}).layers] == [32, 32]


@pytest.mark.parametrize("pattern", [2, [True, False]])
def test_gemmas_pattern_of_windows(pattern):
    keys = {"attention.sliding_window": 32, "attention.sliding_window_pattern": pattern, "attention.key_length": 16}
    assert [layer.attention.window for layer in config("gemma2", **keys).layers] == [32, None]


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("llama", "logit_scale", 0.5),
        ("llama", "residual_scale", 0.2),
        ("llama", "embedding_scale", 12.0),
        ("llama", "attention.scale", 0.1),
        ("llama", "attention.clamp_kqv", 8.0),
        ("llama", "attention.max_alibi_bias", 8.0),
        ("llama", "attention.temperature_length", 8192),
        ("llama", "attn_logit_softcapping", 50.0),
        ("llama", "final_logit_softcapping", 30.0),
        ("llama", "rope.scaling.yarn_log_multiplier", 0.1),
        ("llama", "rope.scaling.attn_factor", 1.2),
        ("llama", "rope.dimension_sections", [8, 8, 0, 0]),
        ("llama", "expert_weights_scale", 2.5),
        ("llama", "expert_gating_func", 2),
        ("qwen3", "attention.sliding_window_pattern", 4),
        ("olmo2", "attention.sliding_window", 4096),  # OLMo 3's file, under OLMo 2's name
        ("llama", "a_key_of_tomorrow", 3),
    ],
)
def test_a_key_that_changes_arithmetic_is_refused_by_its_name(architecture, key, value):
    name = key.rpartition(".")[2]
    with pytest.raises(ValueError, match=rf"{name}.*= .*(refused|without)|{name} = "):
        config(architecture, **{key: value})


def test_what_changes_nothing_is_passed():
    neutral = {"logit_scale": 1.0, "rope.scaling.finetuned": True, "expert_gating_func": 1, "attention.causal": True,
               "attention.value_length": 16, "attention.key_length": 16, "tensor_data_layout": "Meta AI original pth",
               "rope.dimension_count": 16, "vocab_size": 96}  # fmt: skip
    assert config(**neutral).layers == config().layers


def test_other_refusals():
    with pytest.raises(ValueError, match="keys of width 16 and values of width 8"):
        config(**{"attention.key_length": 16, "attention.value_length": 8})
    with pytest.raises(ValueError, match="no model but 'adapter'"):
        config_from_gguf(LLAMA | {"general.type": "adapter"}, SHAPES, lambda _: torch.ones(8))
    with pytest.raises(ValueError, match="scales rotary positions twice"):
        config_from_gguf(LLAMA | {"llama.rope.scale_linear": 2.0}, SHAPES | {"rope_freqs.weight": (8,)},
                         lambda _: torch.ones(8))  # fmt: skip
