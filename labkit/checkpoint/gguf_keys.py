"""GGUF metadata that changes arithmetic: what llama.cpp makes of it is done, or the file is refused by the key's name.

llama.cpp reads for each architecture only the keys that its code names, and so does labkit; but a key that is there
and changes numbers in some architecture is never passed over here. Keys outside the architecture's own (general.*,
tokenizer.*, split.*, quantize.*) change none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from labkit.checkpoint.settings import is_neutral

_READ = frozenset(
    (
        "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.sliding_window",
        "attention.sliding_window_pattern", "attn_logit_softcapping", "final_logit_softcapping",
        "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
        "rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.scale_linear",
        "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
        "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    )
)  # fmt: skip
"""Read by ``gguf_names`` and below; what a family makes of each, its ``Settings`` check."""
_GEMMAS = frozenset(("attention.sliding_window_pattern", "rope.freq_base_swa"))
"""Read for Gemma only."""
_HARMLESS = frozenset(
    (
        "rope.scaling.finetuned", "tensor_data_layout", "expert_shared_count", "pooling_type", "use_parallel_residual",
        "attention.causal",  # false for embedding models, whose architectures are others
    )
)  # fmt: skip
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "expert_gating_func": (0, 1),  # softmax, which these families use
    "expert_weights_norm": (True, False),  # a family's own constant in llama.cpp as here
    "expert_weights_scale": (0, 1),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "interleave_moe_layer_step": (1,),
}
"""Values that change nothing."""


def check_all_read(name: str, metadata: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raise ValueError that names a key of the architecture ``name`` which nothing here reads."""
    for full, value in metadata.items():
        key = full.removeprefix(f"{name}.")
        if key in _GEMMAS and not name.startswith("gemma"):
            pass
        elif key == full or key in _READ or key in _HARMLESS or is_neutral(key, value):
            continue
        if key not in _NEUTRAL or value not in _NEUTRAL[key]:
            raise ValueError(
                f"the GGUF file sets {full} = {value!r:.60}, which labkit does not know for this architecture. "
                "Leaving it out could give wrong numbers without a word, so the file is refused."
            )
    key, value = metadata.get(f"{name}.attention.key_length"), metadata.get(f"{name}.attention.value_length")
    if value is not None and value != (key or value):
        raise ValueError(f"the GGUF file has keys of width {key} and values of width {value}: labkit runs equal ones.")
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ValueError(f"the GGUF file holds no model but {kind!r:.40} (general.type): load the model it belongs to.")


def rope_scaling(
    name: str, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
) -> dict[str, Any] | None:
    """``rope_scaling`` in transformers' words. As in llama.cpp, a factor without a type is a linear one, under either
    of its names."""
    at = f"{name}.rope.scaling."
    original = metadata.get(f"{at}original_context_length", metadata.get(f"{name}.context_length"))
    factor = metadata.get(f"{at}factor", metadata.get(f"{name}.rope.scale_linear"))
    kind = metadata.get(f"{at}type", "linear" if factor else "none")
    factors = {
        "short_factor": next((n for n in ("rope_factors_short.weight", "rope_freqs.weight") if n in shapes), None),
        "long_factor": next((n for n in ("rope_factors_long.weight", "rope_freqs.weight") if n in shapes), None),
    }
    attention_factor = metadata.get(f"{at}attn_factor", 1.0 if "rope_freqs.weight" in shapes else None)
    if factors["short_factor"] and factors["long_factor"]:
        # Llama 3's scaling and Phi-3's LongRoPE both arrive as one divisor for each rotary pair
        if kind in ("linear", "yarn") and factor not in (None, 0, 1):
            raise ValueError(f"the GGUF file scales rotary positions twice: {kind} by {factor}, and pair by pair.")
        lists = {key: read(tensor).flatten().tolist() for key, tensor in factors.items() if tensor}
        spec = {"rope_type": "longrope", "original_max_position_embeddings": original, **lists}
        return spec if attention_factor is None else {**spec, "attention_factor": attention_factor}
    if attention_factor not in (None, 1):
        raise ValueError(f"the GGUF file sets {at}attn_factor = {attention_factor!r} without LongRoPE's divisors.")
    if kind == "none" or (kind == "linear" and factor in (None, 0)):
        return None
    spec = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    named = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    return {**spec, **{ours: metadata[at + key] for ours, key in named.items() if at + key in metadata}}
