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
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
FAMILIES = {
    "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, "n_group": 4, "topk_group": 2},
    "deepseek_v32": {**LATENT, "n_group": 4, "topk_group": 2, "index_n_heads": 2, "index_head_dim": 16},
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
    own = {"v4_hybrid"}  # labkit's own mixture of layers, which no checkpoint has
    assert set(FAMILIES) == set(supported()) - own


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


# --- configs as the hub has them: old spellings, and what they leave out ---------------------------------------------

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "head_dim": 16,
}
LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
RAW = {
    "llama, nothing optional": {"model_type": "llama", **SHAPE},
    "llama, old theta": {"model_type": "llama", **SHAPE, "rope_theta": 500_000.0, "num_key_value_heads": 1},
    "llama, linear": {"model_type": "llama", **SHAPE, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama, dynamic": {"model_type": "llama", **SHAPE, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "llama, llama3": {
        "model_type": "llama",
        **SHAPE,
        "rope_theta": 5e5,
        "max_position_embeddings": 65_536,
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192},
    },
    "llama, biases": {"model_type": "llama", **SHAPE, "attention_bias": True, "mlp_bias": True, "head_dim": None},
    "smollm3": {"model_type": "smollm3", **SHAPE},
    "smollm3, windows": {"model_type": "smollm3", **SHAPE, "use_sliding_window": True, "sliding_window": 16},
    "mistral": {"model_type": "mistral", **SHAPE, "num_attention_heads": 8},
    "mistral, no window": {"model_type": "mistral", **SHAPE, "num_attention_heads": 8, "sliding_window": None},
    "mixtral": {"model_type": "mixtral", **SHAPE, "num_attention_heads": 8},
    "qwen2": {"model_type": "qwen2", **SHAPE, "num_key_value_heads": 2, "head_dim": None},
    "qwen2, yarn": {
        "model_type": "qwen2",
        **SHAPE,
        "num_key_value_heads": 2,
        "head_dim": None,
        "rope_theta": 1e6,
        "rope_scaling": YARN,
    },
    "qwen2, windows": {
        "model_type": "qwen2",
        **SHAPE,
        "num_key_value_heads": 2,
        "head_dim": None,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 3,
    },
    "qwen2_moe": {"model_type": "qwen2_moe", **SHAPE, "num_key_value_heads": 2, "head_dim": None}
    | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 2},
    "qwen3": {"model_type": "qwen3", **SHAPE, "num_key_value_heads": 2},
    "qwen3, default head": {"model_type": "qwen3", **SHAPE, "num_key_value_heads": 2} | {"head_dim": 128},
    "qwen3_moe": {"model_type": "qwen3_moe", **SHAPE, "num_key_value_heads": 2}
    | {"num_experts": 16, "moe_intermediate_size": 16, "mlp_only_layers": [2], "norm_topk_prob": True},
    "gemma2": {"model_type": "gemma2", **SHAPE, "num_key_value_heads": 2},
    "gemma2, no caps": {"model_type": "gemma2", **SHAPE, "num_key_value_heads": 2}
    | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 16},
    "gemma3, sparse as the 4B's": {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 16,
    },
    "gemma3, old thetas": {"model_type": "gemma3_text", **SHAPE, "num_key_value_heads": 2}
    | {"rope_theta": 2e6, "rope_local_base_freq": 5e4, "sliding_window_pattern": 3},
    "phi3": {"model_type": "phi3", **SHAPE, "head_dim": None},
    "phi3, longrope": {"model_type": "phi3", **SHAPE, "head_dim": None}
    | {
        "max_position_embeddings": 131_072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", **LONG},
    },
    "phi3, partial": {"model_type": "phi3", **SHAPE, "head_dim": None, "partial_rotary_factor": 0.5},
    "olmo2": {"model_type": "olmo2", **SHAPE, "head_dim": None, "num_key_value_heads": 2},
    "gpt2": {"model_type": "gpt2"},
    "gpt2, inner": {"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 80}
    | {"scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"},
}


@pytest.mark.parametrize("name", RAW)
def test_sparse_and_old_configs_mean_what_transformers_makes_of_them(name):
    raw = {key: value for key, value in RAW[name].items() if value is not None or key != "head_dim"}
    normalised = transformers.AutoConfig.for_model(**json.loads(json.dumps(raw))).to_dict()
    ours, theirs = config_from_hf(raw), config_from_hf(normalised)
    assert ours == theirs
    rope = ours.layers[0].attention.rope
    if rope is not None and normalised["model_type"] not in ("gemma3_text", "smollm3"):
        assert rope.theta == normalised["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize("name", [name for name in RAW if RAW[name].get("rope_scaling")])
def test_attention_factor_of_scaled_rotary_equals_transformers(name):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    raw = {key: value for key, value in RAW[name].items() if value is not None or key != "head_dim"}
    rope = next(
        layer.attention.rope for layer in reversed(config_from_hf(raw).layers) if layer.attention.window is None
    )
    hf = transformers.AutoConfig.for_model(**json.loads(json.dumps(raw)))
    by_layer = {"layer_type": "full_attention"} if raw["model_type"] == "gemma3_text" else {}
    _, wanted = ROPE_INIT_FUNCTIONS[rope.scaling.kind](hf, "cpu", **by_layer)
    assert (rope.scaling.attention_factor or 1.0) == pytest.approx(wanted)


def test_gemma3_of_the_multimodal_checkpoints_is_its_text_model():
    text = {**RAW["gemma3, sparse as the 4B's"]}
    config = config_from_hf({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert config == config_from_hf(text)
    names = {
        "language_model.model.norm.weight": "final_norm.weight",
        "model.language_model.norm.weight": "final_norm.weight",
        "vision_tower.vision_model.post_layernorm.weight": None,
    }
    for theirs, ours in names.items():
        assert [name for name, _ in tensors_from_hf(config, {theirs: torch.ones(64)})] == ([ours] if ours else [])


def test_su_is_phi3s_first_name_for_longrope():
    old = {**RAW["phi3, longrope"], "head_dim": 8, "rope_scaling": {"type": "su", **LONG}}
    assert config_from_hf(old) == config_from_hf({**RAW["phi3, longrope"], "head_dim": 8})


def test_a_layer_that_lacks_an_expert_is_named():
    config = config_from_hf({**RAW["mixtral"], "num_local_experts": 2})
    tensors = {"model.layers.3.block_sparse_moe.experts.0.w1.weight": torch.ones(48, 32)}
    with pytest.raises(ValueError, match="layer 3: expert 1 of 2 has no gate weight"):
        list(tensors_from_hf(config, tensors))


def test_fused_weights_of_another_model_are_named():
    config = config_from_hf({**RAW["phi3"], "head_dim": 8})
    tensors = {"model.layers.0.self_attn.qkv_proj.weight": torch.ones(64, 32)}
    with pytest.raises(ValueError, match=r"qkv_proj\.weight has shape \(64, 32\).*96 rows \(32 \+ 32 \+ 32\)"):
        list(tensors_from_hf(config, tensors))


@pytest.mark.parametrize("value", ["qwen3_next", "bert", None, 7, ["llama"]])
def test_unknown_architecture_lists_what_is_supported(value):
    with pytest.raises(ValueError, match="is not supported") as error:
        config_from_hf({"model_type": value, **SHAPE})
    assert repr(value) in str(error.value)
    assert all(name in str(error.value) for name in supported())
