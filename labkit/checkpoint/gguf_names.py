"""GGUF metadata in transformers' words, and GGUF tensor names in labkit's.

What llama.cpp's converter changed is changed back here: rows of q and k permuted for its rotary layout
(Llama's family), and 1 added to Gemma's norm weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from labkit.checkpoint.gguf_keys import check_all_read, rope_scaling
from labkit.checkpoint.names import split_qkv, split_rows
from labkit.model.config import DenseFFN, ModelConfig, MoEFFN

ARCHITECTURES = {
    "gpt2": "gpt2",
    "llama": "llama",  # also Mistral, and Mixtral when there are experts
    "smollm3": "smollm3",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "olmo2": "olmo2",
}
PERMUTED = ("llama", "mistral", "mixtral", "smollm3")
"""Families whose q and k rows llama.cpp stores in pairs (interleaved) order."""

_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "vocab_size": "vocab_size",
}
_GPT2_KEYS = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_BIG_GEMMA_LAYERS = {"gemma2": 46, "gemma3": 62}
"""The 27B models, the only ones that scale scores by d_model / n_heads instead of d_head."""

Read = Callable[[str], Tensor]


def settings_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], read: Read
) -> dict[str, Any]:
    """What ``config.json`` would say. ``read`` fetches a tensor: the rotary factors are stored as one."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"GGUF architecture {name!r} is not supported. labkit runs {', '.join(sorted(ARCHITECTURES))}: "
            "choose a file of one of these (general.architecture in its metadata)."
        )
    keys = _GPT2_KEYS if name == "gpt2" else _KEYS
    values = {ours: metadata[f"{name}.{key}"] for key, ours in keys.items() if f"{name}.{key}" in metadata}
    for key, value in values.items():
        if isinstance(value, list):  # some converters repeat a count for each layer
            if len(set(map(repr, value))) != 1:
                raise ValueError(f"GGUF {key} differs between layers ({value[:8]}...), which is not supported.")
            values[key] = value[0]
    values["model_type"] = ARCHITECTURES[name]
    if name == "llama" and (values.get("num_experts") or values.get("sliding_window")):
        values["model_type"] = "mixtral" if values.get("num_experts") else "mistral"
    values["tie_word_embeddings"] = "output.weight" not in shapes
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) == 2:
        values["vocab_size"] = embedding[0]
    check_all_read(name, metadata, values)
    if name == "gpt2":
        return values
    values.setdefault("hidden_act", "silu")
    values["attention_bias"] = "blk.0.attn_output.bias" in shapes
    values["mlp_bias"] = "blk.0.ffn_down.bias" in shapes
    if "num_experts" in values:
        values["num_local_experts"] = values["num_experts"]
    if name == "qwen3moe":
        values["norm_topk_prob"] = True
    if name.startswith("gemma"):
        values.update(_gemma(name, metadata, values))
    rotary = metadata.get(f"{name}.rope.dimension_count")
    d_head = values.get("head_dim")
    if d_head is None and values.get("num_attention_heads"):
        d_head = values.get("hidden_size", 0) // values["num_attention_heads"]
    if isinstance(rotary, int) and d_head and rotary < d_head:
        values["partial_rotary_factor"] = rotary / d_head
    values["rope_scaling"] = rope_scaling(name, metadata, shapes, read)
    return values


def _gemma(name: str, metadata: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp keeps in its code rather than in the file."""
    extra: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh"}
    n_layers, n_heads = values.get("num_hidden_layers"), values.get("num_attention_heads")
    if n_layers == _BIG_GEMMA_LAYERS[name] and n_heads:
        extra["query_pre_attn_scalar"] = values.get("hidden_size", 0) // n_heads
    elif "head_dim" in values:
        extra["query_pre_attn_scalar"] = values["head_dim"]
    pattern = metadata.get(f"{name}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        extra["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
    elif pattern is not None:
        extra["sliding_window_pattern"] = pattern
    if name == "gemma3":
        extra["rope_theta"] = values.get("rope_theta", 1_000_000.0)
        extra["rope_local_base_freq"] = metadata.get("gemma3.rope.freq_base_swa", 10_000.0)
    return extra


_TOP = {
    "token_embd.weight": "embedding.weight",
    "position_embd.weight": "positions.weight",
    "output_norm.weight": "final_norm.weight",
    "output_norm.bias": "final_norm.bias",
    "output.weight": "head.weight",
    "output.bias": "head.bias",
}
_MODULES = {
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_output": "attention.o_proj",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "attn_norm": "attention_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "ffn.gate_proj",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
    "ffn_gate_inp": "ffn.router",
    "ffn_gate_shexp": "ffn.shared.gate_proj",
    "ffn_up_shexp": "ffn.shared.up_proj",
    "ffn_down_shexp": "ffn.shared.down_proj",
    "ffn_gate_inp_shexp": "ffn.shared_gate",
}
_POST_NORMS = {
    "post": {"post_attention_norm": "attention_norm", "post_ffw_norm": "ffn_norm"},
    "sandwich": {"post_attention_norm": "attention_post_norm", "post_ffw_norm": "ffn_post_norm"},
    "pre": {},
}
_LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
_ROPE = re.compile(r"rope_(freqs|factors_short|factors_long)\.weight")


def tensors_from_gguf(config: ModelConfig, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield ``(labkit name, tensor)``; a name that means nothing to this family passes unchanged."""
    for name, tensor in tensors:
        if _ROPE.fullmatch(name):
            continue  # already part of the config
        match = _LAYER.fullmatch(name)
        if match is None or int(match[1]) >= config.n_layers:
            pairs = iter([(_TOP.get(name, name), tensor)])
        else:
            pairs = _layer_tensors(config, int(match[1]), match[2], match[3], name, tensor)
        for own, value in pairs:
            if config.norm.unit_offset and own.endswith("norm.weight"):
                value = value - 1
            yield own, value


def _layer_tensors(
    config: ModelConfig, layer_idx: int, module: str, kind: str, name: str, tensor: Any
) -> Iterator[tuple[str, Any]]:
    layer, at = config.layers[layer_idx], f"layers.{layer_idx}."
    ffn = layer.ffn
    if module == "attn_qkv":
        yield from split_qkv(config, layer_idx, kind, name, tensor)
    elif module == "ffn_up" and config.family == "phi3" and isinstance(ffn, DenseFFN):
        yield from split_rows(tensor, name, {f"{at}ffn.{x}_proj.{kind}": ffn.d_ff for x in ("gate", "up")})
    elif module.endswith("_exps") and isinstance(ffn, MoEFFN):
        part = module.removeprefix("ffn_").removesuffix("_exps")
        yield (f"{at}ffn.experts.{part}" if kind == "weight" else name), tensor
    else:
        own = _MODULES.get(module) or _POST_NORMS[layer.norms].get(module)
        if module == "ffn_gate_inp_shexp" and tensor.ndim == 1:
            tensor = tensor[None]
        if module in ("attn_q", "attn_k") and config.family in PERMUTED:
            attention = layer.attention
            n_heads = attention.n_heads if module == "attn_q" else getattr(attention, "n_kv_heads", 1)
            tensor = halves_from_pairs(tensor, n_heads, name)
        yield (f"{at}{own}.{kind}" if own else name), tensor


def halves_from_pairs(tensor: Any, n_heads: int, name: str) -> Any:
    """Undo llama.cpp's row order: (x0, y0, x1, y1, ...) in each head back to (x0, x1, ..., y0, y1, ...)."""
    rows = tensor.shape[0]
    if rows % (2 * n_heads):
        raise ValueError(
            f"tensor {name} has {rows} rows, which {n_heads} heads of even width cannot share. "
            "The file's metadata and its weights belong to different models."
        )
    order = torch.arange(rows).view(n_heads, rows // n_heads // 2, 2).transpose(1, 2).flatten()
    return tensor[order]
