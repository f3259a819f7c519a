"""Tiny random models of every family: transformers' own, and labkit's with the same weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from labkit.checkpoint.translate import config_from_hf, tensors_from_hf
from labkit.model import Transformer

WINDOW = 8

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "original_max_position_embeddings": 16}
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 2.0, 4.0, 9.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, **FACTORS}
GEMMA3 = {
    "head_dim": 16,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    },
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
GROUPS = {"n_group": 4, "topk_group": 2}
MSCALES = {**YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.7}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    "gpt2-scaled-by-layer": (
        "gpt2",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "scale_attn_by_inverse_layer_idx": True},
    ),
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 16}}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-yarn": ("llama", {"rope_parameters": {**YARN, "rope_theta": 1e4}}),
    "llama-yarn-untruncated": ("llama", {"rope_parameters": {**YARN, "truncate": False, "rope_theta": 1e4}}),
    "smollm2": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 2}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3-sliding": ("smollm3", {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": WINDOW}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "mistral-full": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": WINDOW}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 24}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3_moe-not-renormalized": ("qwen3_moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": False}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}),
    "gemma3": ("gemma3_text", {**GEMMA3, "sliding_window": WINDOW, "num_hidden_layers": 7}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "phi3-longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.5}),
    "deepseek-v2": ("deepseek_v2", {**LATENT, "routed_scaling_factor": 1.5}),
    "deepseek-v2-lite": ("deepseek_v2", {**LATENT, "q_lora_rank": None, "rope_parameters": MSCALES}),
    "deepseek-v2-groups": ("deepseek_v2", {**LATENT, **GROUPS, "topk_method": "group_limited_greedy"}),
    "deepseek-v3": ("deepseek_v3", {**LATENT, **GROUPS, "rope_parameters": MSCALES}),
    "deepseek-v3-biases": (
        "deepseek_v3",
        {**LATENT, **GROUPS, "attention_bias": True, "rope_interleave": False, "norm_topk_prob": False},
    ),
    "deepseek-v3.2": ("deepseek_v32", {**LATENT, **GROUPS, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 6}),
    "olmo2": ("olmo2", {}),
    "olmo2-mha": ("olmo2", {"num_key_value_heads": 4}),
}
"""Name to (model_type, what its config changes). Every family the issue names, and every switch of each."""


@cache
def pair(name: str) -> tuple[Any, Transformer]:
    """transformers' model and labkit's, float32, alike in every weight."""
    import transformers

    family, changes = VARIANTS[name]
    config_class = type(transformers.AutoConfig.for_model(family))
    config = config_class(**{**SMALL, **changes})
    # Gemma 2's soft cap exists only in the eager form; the oracle is eager everywhere.
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomize(theirs, seed=len(name))
    ours = Transformer(config_from_hf(config.to_dict()))
    ours.load_state_dict(dict(tensors_from_hf(ours.config, theirs.state_dict())))
    return theirs, ours


@torch.no_grad()
def randomize(model: Any, *, seed: int) -> None:
    """Weights that let no mistake hide: norms off 1, biases off 0, attention far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    for name, weight in (*model.named_parameters(), *biases):
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim >= 2:
            weight.copy_(noise * 1.5 * weight.shape[-1] ** -0.5)
        elif "norm" in name or ".ln_" in name:
            weight.copy_(1.0 + 0.3 * noise)
        else:
            weight.copy_(0.3 * noise)


def token_ids(n: int, seed: int = 0) -> torch.Tensor:
    """n ids that are neither pad, bos nor eos."""
    return torch.randint(3, SMALL["vocab_size"], (n,), generator=torch.Generator().manual_seed(seed))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Fail unless the largest difference is at most 1e-4 of the largest value wanted."""
    assert got.shape == want.shape
    error = float((got - want).abs().max() / want.abs().max())
    assert error <= 1e-4, f"relative error {error:.2e}"
