"""Transformers' ``config.json`` to one ``ModelConfig``: a function for each architecture that labkit runs."""

from __future__ import annotations

from typing import Any

from labkit.checkpoint.rope_settings import rope_from, usable_context
from labkit.checkpoint.settings import Settings
from labkit.model.config import DenseFFN, GroupedAttention, Layer, ModelConfig, MoEFFN, Norm, Rope

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
MAX_LAYERS = 4096


def _activation(settings: Settings, *keys: str) -> Any:
    name = next((settings.get(key) for key in keys if settings.get(key)), None)
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not supported: labkit knows {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def _n_layers(settings: Settings) -> int:
    return settings.count("num_hidden_layers", high=MAX_LAYERS)


def _grouped(settings: Settings, **variant: Any) -> GroupedAttention:
    """The attention of one layer: head counts from the config, the family's variant on top."""
    n_heads = settings.count("num_attention_heads", high=65_536)
    n_kv_heads = settings.count("num_key_value_heads", n_heads, high=65_536)
    if n_heads % n_kv_heads:
        raise ValueError(f"config: {n_heads} query heads cannot share {n_kv_heads} key/value heads evenly.")
    return GroupedAttention(n_heads, n_kv_heads, _d_head(settings), **variant)


def _d_head(settings: Settings) -> int:
    d_model, n_heads = settings.count("hidden_size"), settings.count("num_attention_heads")
    if settings.get("head_dim") is None and d_model % n_heads:
        raise ValueError(
            f"config: hidden_size {d_model} is not a multiple of {n_heads} heads, and no head_dim is given."
        )
    return settings.count("head_dim", d_model // n_heads)


def _swiglu(settings: Settings) -> DenseFFN:
    bias = settings.flag("mlp_bias")
    return DenseFFN(settings.count("intermediate_size"), _activation(settings, "hidden_act"), bias=bias)


def _decoder(family: str, settings: Settings, layers: tuple[Layer, ...], **variant: Any) -> ModelConfig:
    """What every RMSNorm decoder shares."""
    rope = next((layer.attention.rope for layer in layers if layer.attention.rope), None)
    norm = variant.pop("norm", Norm(eps=settings.number("rms_norm_eps")))
    return ModelConfig(
        family=family,
        vocab_size=settings.count("vocab_size"),
        d_model=settings.count("hidden_size"),
        context_tokens=usable_context(settings, rope),
        layers=layers,
        norm=norm,
        tied_embeddings=settings.flag("tie_word_embeddings"),
        **variant,
    )


def llama(family: str, settings: Settings) -> ModelConfig:
    """Llama 1-3 and SmolLM2: GQA, SwiGLU, pre-norm."""
    bias = settings.flag("attention_bias")
    rope = rope_from(settings, _d_head(settings))
    layer = Layer(_grouped(settings, rope=rope, qkv_bias=bias, out_bias=bias), _swiglu(settings))
    return _decoder(family, settings, (layer,) * _n_layers(settings))


def smollm3(family: str, settings: Settings) -> ModelConfig:
    """SmolLM3: Llama with no rotary on every fourth layer (NoPE)."""
    n_layers, bias = _n_layers(settings), settings.flag("attention_bias")
    interval = settings.count("no_rope_layer_interval", 4)
    rotated = settings.per_layer("no_rope_layers", n_layers)  # 1 where rotary is applied, despite its name
    rotated = rotated or [int((i + 1) % interval != 0) for i in range(n_layers)]
    window = settings.optional_count("sliding_window") if settings.flag("use_sliding_window") else None
    settings.decided("sliding_window", "max_window_layers", "no_rope_layer_interval")
    kinds = settings.per_layer("layer_types", n_layers)
    kinds = kinds or ["sliding_attention" if window and not on else "full_attention" for on in rotated]
    rope, ffn = rope_from(settings, _d_head(settings), theta=2_000_000.0), _swiglu(settings)

    def layer(on: Any, kind: str) -> Layer:
        own_window = window if kind == "sliding_attention" else None
        own_rope = rope if on else None
        return Layer(_grouped(settings, rope=own_rope, window=own_window, qkv_bias=bias, out_bias=bias), ffn)

    return _decoder(family, settings, tuple(layer(on, kind) for on, kind in zip(rotated, kinds, strict=True)))


def mistral(family: str, settings: Settings) -> ModelConfig:
    """Mistral: Llama with a sliding window on every layer."""
    rope = rope_from(settings, _d_head(settings))
    attention = _grouped(settings, rope=rope, window=settings.optional_count("sliding_window"))
    return _decoder(family, settings, (Layer(attention, _swiglu(settings)),) * _n_layers(settings))


def mixtral(family: str, settings: Settings) -> ModelConfig:
    """Mixtral (arXiv 2401.04088): Mistral with 8 experts, 2 a token, gates renormalised over the chosen."""
    rope = rope_from(settings, _d_head(settings), theta=1_000_000.0)
    attention = _grouped(settings, rope=rope, window=settings.optional_count("sliding_window"))
    ffn = _experts(settings, n_experts=settings.count("num_local_experts"), d_ff="intermediate_size", renormalize=True)
    return _decoder(family, settings, (Layer(attention, ffn),) * _n_layers(settings))


def qwen(family: str, settings: Settings) -> ModelConfig:
    """Qwen2 (biases on q, k, v), Qwen3 (QK-norm instead), and their mixtures of experts."""
    n_layers, is_v2 = _n_layers(settings), family.startswith("qwen2")
    windows = _qwen_windows(family, settings, n_layers)
    rope = rope_from(settings, _d_head(settings))
    bias = settings.flag("attention_bias")
    variant = (
        {"qkv_bias": settings.flag("qkv_bias", True)}
        if is_v2
        else {"qkv_bias": bias, "out_bias": bias, "qk_norm": "head"}
    )

    def layer(i: int) -> Layer:
        ffn = _qwen_experts(family, settings) if _is_sparse(family, settings, i) else _swiglu(settings)
        return Layer(_grouped(settings, rope=rope, window=windows[i], **variant), ffn)

    return _decoder(family, settings, tuple(layer(i) for i in range(n_layers)))


def _qwen_windows(family: str, settings: Settings, n_layers: int) -> list[int | None]:
    """Each layer's window: off unless ``use_sliding_window``; which layers have one differs by family."""
    window = settings.optional_count("sliding_window") if settings.flag("use_sliding_window") else None
    settings.decided("sliding_window", "max_window_layers")
    if window is None or family == "qwen3_moe":
        return [window] * n_layers
    kinds = settings.per_layer("layer_types", n_layers)
    if kinds is None:
        full_until = settings.count("max_window_layers", n_layers, low=0)
        if family == "qwen2_moe":
            return [window if i % 2 == 0 and i < full_until else None for i in range(n_layers)]
        return [window if i >= full_until else None for i in range(n_layers)]
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _is_sparse(family: str, settings: Settings, layer_idx: int) -> bool:
    if not family.endswith("_moe") or layer_idx in settings.indices("mlp_only_layers"):
        return False
    return (layer_idx + 1) % settings.count("decoder_sparse_step", 1) == 0


def _qwen_experts(family: str, settings: Settings) -> MoEFFN:
    shared = settings.count("shared_expert_intermediate_size") if family == "qwen2_moe" else 0
    return _experts(
        settings,
        n_experts=settings.count("num_experts", settings.get("num_local_experts")),
        d_ff="moe_intermediate_size",
        renormalize=settings.flag("norm_topk_prob"),
        d_ff_shared=shared,
        shared_gate=bool(shared),
    )


def _experts(settings: Settings, *, n_experts: int, d_ff: str, **variant: Any) -> MoEFFN:
    n_active = settings.count("num_experts_per_tok")
    if n_active > n_experts:
        raise ValueError(f"config: {n_active} experts a token, but there are only {n_experts}.")
    return MoEFFN(n_experts, n_active, settings.count(d_ff), _activation(settings, "hidden_act"), **variant)


def gemma(family: str, settings: Settings) -> ModelConfig:
    """Gemma 2 (soft-capped logits) and Gemma 3 (QK-norm, two rotary bases): sandwich norms, local and global layers."""
    if settings.get("use_bidirectional_attention"):
        raise ValueError(f"{family} with bidirectional attention is an embedding model: labkit runs causal models.")
    n_layers, is_v3 = _n_layers(settings), family != "gemma2"
    pattern = settings.count("sliding_window_pattern", settings.get("_sliding_window_pattern", 6 if is_v3 else 2))
    settings.decided("sliding_window", "rope_local_base_freq", "rope_theta", "rope_scaling", "rope_parameters")
    kinds = settings.per_layer("layer_types", n_layers)
    kinds = kinds or ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(n_layers)]
    d_head, bias = _d_head(settings), settings.flag("attention_bias")
    ropes = {kind: _gemma_rope(settings, kind, d_head, is_v3=is_v3) for kind in set(kinds)}
    ffn = DenseFFN(settings.count("intermediate_size"), _activation(settings, "hidden_activation", "hidden_act"))
    variant: dict[str, Any] = {
        "qk_norm": "head" if is_v3 else None,
        "qkv_bias": bias,
        "out_bias": bias,
        "softcap": settings.optional_number("attn_logit_softcapping"),
        "scale": settings.number("query_pre_attn_scalar") ** -0.5,
    }

    def layer(kind: str) -> Layer:
        window = settings.optional_count("sliding_window") if kind == "sliding_attention" else None
        return Layer(_grouped(settings, rope=ropes[kind], window=window, **variant), ffn, "sandwich")

    return _decoder(
        family,
        settings,
        tuple(layer(kind) for kind in kinds),
        norm=Norm(eps=settings.number("rms_norm_eps"), unit_offset=True),
        embedding_scale=settings.count("hidden_size") ** 0.5,
        logit_softcap=settings.optional_number("final_logit_softcapping"),
    )


def _gemma_rope(settings: Settings, kind: str, d_head: int, *, is_v3: bool) -> Rope:
    if not is_v3:
        return rope_from(settings, d_head)
    if kind == "sliding_attention":
        if isinstance(settings.table("rope_parameters").get(kind), dict):
            return rope_from(settings, d_head, layer_type=kind)
        return Rope(theta=settings.number("rope_local_base_freq", 10_000.0))  # never scaled
    return rope_from(settings, d_head, layer_type=kind, theta=1_000_000.0)


def phi3(family: str, settings: Settings) -> ModelConfig:
    """Phi-3: Llama with partial rotary and LongRoPE; q, k, v and gate, up are stored fused."""
    rope = rope_from(settings, _d_head(settings))
    attention = _grouped(settings, rope=rope, window=settings.optional_count("sliding_window"))
    return _decoder(family, settings, (Layer(attention, _swiglu(settings)),) * _n_layers(settings))


def olmo2(family: str, settings: Settings) -> ModelConfig:
    """OLMo 2 (arXiv 2501.00656): norms after the sub-layers, and over the whole of q and k."""
    bias = settings.flag("attention_bias")
    rope = rope_from(settings, _d_head(settings))
    attention = _grouped(settings, rope=rope, qk_norm="full", qkv_bias=bias, out_bias=bias)
    return _decoder(family, settings, (Layer(attention, _swiglu(settings), "post"),) * _n_layers(settings))


def gpt2(family: str, settings: Settings) -> ModelConfig:
    """GPT-2: learned positions, LayerNorm, MHA with biases, a two-layer GELU FFN."""
    d_model, n_heads = settings.count("n_embd"), settings.count("n_head")
    if d_model % n_heads:
        raise ValueError(f"config: n_embd {d_model} is not a multiple of n_head {n_heads}.")
    d_head = d_model // n_heads
    activation = _activation(settings, "activation_function")
    ffn = DenseFFN(settings.count("n_inner", 4 * d_model), activation, gated=False, bias=True)

    def layer(layer_idx: int) -> Layer:
        scale = d_head**-0.5 if settings.flag("scale_attn_weights", True) else 1.0
        scale /= layer_idx + 1 if settings.flag("scale_attn_by_inverse_layer_idx") else 1
        return Layer(GroupedAttention(n_heads, n_heads, d_head, qkv_bias=True, out_bias=True, scale=scale), ffn)

    return ModelConfig(
        family=family,
        vocab_size=settings.count("vocab_size"),
        d_model=d_model,
        context_tokens=settings.count("n_positions"),
        layers=tuple(layer(i) for i in range(settings.count("n_layer", high=MAX_LAYERS))),
        norm=Norm("layer", eps=settings.number("layer_norm_epsilon"), bias=True),
        tied_embeddings=settings.flag("tie_word_embeddings", True),
        learned_positions=True,
    )
