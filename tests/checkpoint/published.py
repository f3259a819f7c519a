"""Shapes of published config.json files: the keys that each sets, and to what. Sizes are left out: tests choose small
ones.

Facts from the models' own repositories. `None` is JSON's null. Keys that every file has and no arithmetic (dtype,
version, dropout) stand in COMMON.
"""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "use_cache": True,
}
LLAMA = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "pretraining_tp": 1, "rope_scaling": None}
BIASES = {"attention_bias": False, "mlp_bias": False}
LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
          "original_max_position_embeddings": 8192}  # fmt: skip
MISTRAL = {"model_type": "mistral", "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
QWEN2 = {"model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_window_layers": 28,
         "use_sliding_window": False}  # fmt: skip
QWEN3 = {**QWEN2, "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "rope_scaling": None,
         "sliding_window": None}  # fmt: skip
GEMMA2 = {"model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0, "cache_implementation":
          "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
          "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "query_pre_attn_scalar": 256,
          "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096}  # fmt: skip
GEMMA3 = {**{k: v for k, v in GEMMA2.items() if k != "hidden_act"}, "model_type": "gemma3_text",
          "attn_logit_softcapping": None, "final_logit_softcapping": None, "max_position_embeddings": 32768,
          "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
          "sliding_window_pattern": 6}  # fmt: skip
PHI3 = {"model_type": "phi3", "attention_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "embd_pdrop": 0.0, "resid_pdrop": 0.0, "tie_word_embeddings": False}  # fmt: skip
LONG = {"type": "longrope", "short_factor": "short", "long_factor": "long"}
OLMO2 = {"model_type": "olmo2", "attention_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-6,
         "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False}  # fmt: skip
GPT2 = {"model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5, "n_ctx": 1024, "n_positions": 1024, "resid_pdrop": 0.1,
        "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
        "summary_type": "cls_index", "summary_use_proj": True}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M-Instruct": {**LLAMA, **BIASES, "is_llama_config": True, "max_position_embeddings": 8192,
                              "rope_interleaved": False, "rope_theta": 100000, "tie_word_embeddings": True,
                              "pad_token_id": 2},
    "SmolLM2-1.7B": {**LLAMA, **BIASES, "max_position_embeddings": 8192, "rope_theta": 130000,
                     "tie_word_embeddings": True},
    "Llama-2-7b-hf": {**LLAMA, "max_position_embeddings": 4096, "tie_word_embeddings": False},
    "Llama-3-8B": {**LLAMA, "attention_bias": False, "max_position_embeddings": 8192, "rope_theta": 500000.0},
    "Llama-3.1-8B-Instruct": {**LLAMA, **BIASES, "max_position_embeddings": 131072, "rope_scaling": LLAMA3,
                              "rope_theta": 500000.0, "eos_token_id": [2, 3]},
    "Llama-3.2-1B-Instruct": {**LLAMA, **BIASES, "head_dim": 64, "max_position_embeddings": 131072,
                              "rope_scaling": {**LLAMA3, "factor": 32.0}, "rope_theta": 500000.0,
                              "tie_word_embeddings": True},
    "TinyLlama-1.1B-Chat": {**LLAMA, "attention_bias": False, "max_position_embeddings": 2048, "rope_theta": 10000.0},
    "CodeLlama-7b": {**LLAMA, "max_position_embeddings": 16384, "rope_theta": 1000000},
    "deepseek-coder-1.3b": {**LLAMA, "attention_bias": False, "max_position_embeddings": 16384, "rope_theta": 100000,
                            "rope_scaling": {"factor": 4.0, "type": "linear"}},
    "DeepSeek-R1-Distill-Llama-8B": {**LLAMA, **BIASES, "max_position_embeddings": 131072, "rope_scaling": LLAMA3,
                                     "rope_theta": 500000.0},
    "LongChat-7b-v1.5-32k": {**LLAMA, "max_position_embeddings": 4096, "rope_scaling": {"factor": 8.0,
                                                                                        "type": "linear"}},
    "a dynamic Llama 2 (documented)": {**LLAMA, "max_position_embeddings": 4096, "rope_scaling": {"factor": 2.0,
                                                                                              "type": "dynamic"}},
    "Yarn-Llama-2-7b-64k": {**LLAMA, "max_position_embeddings": 4096, "rope_scaling": {
        "factor": 16.0, "original_max_position_embeddings": 4096, "type": "yarn", "finetuned": True}},
    "Yi-6B": {**LLAMA, "max_position_embeddings": 4096, "rope_theta": 5000000.0},
    "Falcon3-1B": {**LLAMA, **BIASES, "activation": "swiglu", "head_dim": 256, "max_position_embeddings": 4096,
                   "rope_theta": 1000042},
    "granite-code-3b": {**LLAMA, "attention_bias": True, "mlp_bias": True, "rope_theta": 10000000,
                        "max_position_embeddings": 2048, "tie_word_embeddings": True},
    "Mistral-7B-v0.1": {**MISTRAL, "max_position_embeddings": 32768, "rope_theta": 10000.0, "sliding_window": 4096},
    "Mistral-7B-Instruct-v0.3": {**MISTRAL, "max_position_embeddings": 32768, "rope_theta": 1e6, "sliding_window":
                                 None},
    "Mistral-Nemo-2407": {**MISTRAL, "head_dim": 128, "max_position_embeddings": 128000, "rope_theta": 1e6,
                          "sliding_window": None},
    "Mixtral-8x7B": {**MISTRAL, "model_type": "mixtral", "max_position_embeddings": 32768, "num_experts_per_tok": 2,
                     "num_local_experts": 8, "output_router_logits": False, "rope_theta": 1e6,
                     "router_aux_loss_coef": 0.02, "sliding_window": None},
    "Qwen2-0.5B": {**QWEN2, "max_position_embeddings": 131072, "max_window_layers": 24, "sliding_window": 131072,
                   "tie_word_embeddings": True},
    "Qwen2.5-7B-Instruct": {**QWEN2, "max_position_embeddings": 32768, "sliding_window": 131072,
                            "tie_word_embeddings": False},
    "Qwen2.5-7B-Instruct, YaRN (its card)": {**QWEN2, "max_position_embeddings": 32768, "sliding_window": 131072,
                                 "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768,
                                                  "type": "yarn"}},
    "Qwen2.5-Coder-1.5B": {**QWEN2, "max_position_embeddings": 32768, "sliding_window": 32768, "rope_scaling": None,
                           "tie_word_embeddings": True},
    "DeepSeek-R1-Distill-Qwen-1.5B": {**QWEN2, "max_position_embeddings": 131072, "max_window_layers": 21,
                                      "rope_theta": 10000, "sliding_window": 4096, "use_mrope": False},
    "Qwen1.5-MoE-A2.7B": {**QWEN2, "model_type": "qwen2_moe", "decoder_sparse_step": 1, "moe_intermediate_size": 1408,
                          "norm_topk_prob": False, "num_experts": 60, "num_experts_per_tok": 4,
                          "output_router_logits": False, "router_aux_loss_coef": 0.001, "qkv_bias": True,
                          "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
                          "max_position_embeddings": 8192},
    "Qwen3-0.6B": {**QWEN3, "max_position_embeddings": 40960, "tie_word_embeddings": True},
    "Qwen3-8B": {**QWEN3, "max_position_embeddings": 40960, "max_window_layers": 36, "tie_word_embeddings": False},
    "Qwen3-8B, YaRN (its card)": {**QWEN3, "max_position_embeddings": 40960, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    "Qwen3-30B-A3B": {**QWEN3, "model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [],
                      "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128,
                      "num_experts_per_tok": 8, "output_router_logits": False, "router_aux_loss_coef": 0.001,
                      "max_position_embeddings": 40960},
    "gemma-2-2b-it": GEMMA2,
    "gemma-2-27b": {**GEMMA2, "head_dim": 128, "query_pre_attn_scalar": 144, "_attn_implementation": "eager"},
    "gemma-3-1b-it": GEMMA3,
    "gemma-3-270m": {**GEMMA3, "_sliding_window_pattern": 6, "use_bidirectional_attention": False, "layer_types": [
        *["sliding_attention"] * 5, "full_attention", "sliding_attention"]},
    "gemma-3-4b-text": {**GEMMA3, "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "Phi-3-mini-4k-instruct": {**PHI3, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
                               "rope_scaling": None, "sliding_window": 2047},
    "Phi-3.5-mini-instruct": {**PHI3, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
                              "rope_scaling": LONG, "sliding_window": 262144},
    "phi-4": {**PHI3, "max_position_embeddings": 16384, "original_max_position_embeddings": 16384,
              "rope_scaling": None, "rope_theta": 250000, "sliding_window": None},
    "Phi-4-mini-instruct": {**PHI3, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False,
                            "max_position_embeddings": 131072, "mlp_bias": False,
                            "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
                            "rope_scaling": LONG, "sliding_window": 262144, "tie_word_embeddings": True},
    "OLMo-2-1124-7B": {**OLMO2, "max_position_embeddings": 4096},
    "OLMo-2-0425-1B": {**OLMO2, "max_position_embeddings": 4096},
    "SmolLM3-3B": {"model_type": "smollm3", **BIASES, "hidden_act": "silu", "layer_types": None,
                   "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False,
                   "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0, 1, 1, 1], "pretraining_tp": 2,
                   "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
                   "use_sliding_window": False},
    "gpt2": {**GPT2, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}},
    "gpt2, scaled by layer": {**GPT2, "reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True,
                             "scale_attn_weights": True},
    "saved by transformers 5": {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, **BIASES,
                                "dtype": "bfloat16", "max_position_embeddings": 8192, "rope_parameters": {
                                    "rope_theta": 100000.0, "rope_type": "default"}},
}  # fmt: skip

ENDS: dict[str, tuple[Any, Any, str | None, str, set[str]]] = {
    # name: (config's eos, generation's eos, tokenizer's eos, what the template writes, all that end an answer)
    "SmolLM2-135M-Instruct": ("<|im_end|>", "<|im_end|>", "<|im_end|>", "<|im_end|>", {"<|im_end|>"}),
    "a ChatML fine-tune of a base model": (
        "<|endoftext|>", "<|endoftext|>", "<|endoftext|>", "<|im_end|>", {"<|endoftext|>", "<|im_end|>"}),
    "Llama-3-8B-Instruct": (
        "<|end_of_text|>", ["<|end_of_text|>", "<|eot_id|>"], "<|eot_id|>", "<|eot_id|>",
        {"<|end_of_text|>", "<|eot_id|>"}),
    "Llama-3.1-8B-Instruct": (
        ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], None, "<|eot_id|>", "<|eot_id|>",
        {"<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"}),
    "gemma-2-2b-it": ("<eos>", ["<eos>", "<end_of_turn>"], "<eos>", "<end_of_turn>", {"<eos>", "<end_of_turn>"}),
    "gemma, older files": ("<eos>", "<eos>", "<eos>", "<end_of_turn>", {"<eos>", "<end_of_turn>"}),
    "Phi-3-mini-4k-instruct": (
        "<|endoftext|>", ["<|endoftext|>", "<|end|>"], "<|endoftext|>", "<|end|>", {"<|endoftext|>", "<|end|>"}),
    "Qwen2.5-7B-Instruct": (
        "<|im_end|>", ["<|im_end|>", "<|endoftext|>"], "<|im_end|>", "<|im_end|>", {"<|im_end|>", "<|endoftext|>"}),
    "Mistral-7B-Instruct": ("</s>", "</s>", "</s>", "</s>", {"</s>"}),
    "gpt2": ("<|endoftext|>", None, None, "", {"<|endoftext|>"}),
}  # fmt: skip
