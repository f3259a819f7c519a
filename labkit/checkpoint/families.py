"""Every model family that labkit runs: its architecture, and the defaults its config.json may leave out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.checkpoint import architectures, deepseek
from labkit.checkpoint.settings import Settings
from labkit.model.config import ModelConfig


@dataclass(frozen=True)
class Family:
    """How one ``model_type`` is read."""

    name: str
    build: Callable[[str, Settings], ModelConfig]
    defaults: Mapping[str, Any] = field(default_factory=dict)


_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_GEMMA = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA3 = {**_GEMMA, "vocab_size": 262_208, "max_position_embeddings": 131_072}
_QWEN = {**_COMMON, "max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28}
_GPT2 = {
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "vocab_size": 50_257,
    "n_positions": 1024,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
}
_DEEPSEEK_V2 = {
    **_COMMON,
    "max_position_embeddings": 2048,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.0,
}
_DEEPSEEK_V3 = {
    **_DEEPSEEK_V2,
    "max_position_embeddings": 4096,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_DEEPSEEK_V32 = {
    **_DEEPSEEK_V3,
    "max_position_embeddings": 163_840,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("gpt2", architectures.gpt2, _GPT2),
        Family("llama", architectures.llama, {**_COMMON, "max_position_embeddings": 2048}),
        Family(
            "smollm3",
            architectures.smollm3,
            {**_COMMON, "max_position_embeddings": 32_768, "num_key_value_heads": 4, "tie_word_embeddings": True},
        ),
        Family(
            "mistral",
            architectures.mistral,
            {**_COMMON, "max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
        ),
        Family(
            "mixtral",
            architectures.mixtral,
            {
                **_COMMON,
                "max_position_embeddings": 131_072,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
        ),
        Family("qwen2", architectures.qwen, _QWEN),
        Family("qwen2_moe", architectures.qwen, {**_QWEN, "num_experts": 60, "num_experts_per_tok": 4}),
        Family("qwen3", architectures.qwen, {**_QWEN, "head_dim": 128}),
        Family("qwen3_moe", architectures.qwen, {**_QWEN, "num_experts_per_tok": 8}),
        Family(
            "gemma2",
            architectures.gemma,
            {
                **_GEMMA,
                "max_position_embeddings": 8192,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
        ),
        Family("gemma3_text", architectures.gemma, _GEMMA3),
        Family(
            "phi3",
            architectures.phi3,
            {
                **_COMMON,
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
            },
        ),
        Family("deepseek_v2", deepseek.deepseek, _DEEPSEEK_V2),
        Family("deepseek_v3", deepseek.deepseek, _DEEPSEEK_V3),
        Family("deepseek_v32", deepseek.deepseek, _DEEPSEEK_V32),
        Family(
            "v4_hybrid",
            deepseek.hybrid,
            {**_COMMON, "rope_theta": 10_000.0, "n_shared_experts": 1, "routed_scaling_factor": 1.5},
        ),
        Family("olmo2", architectures.olmo2, {**_COMMON, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}),
    )
}
