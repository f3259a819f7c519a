"""DeepSeek's config.json: V2 and V3 (latent attention, their gates), V3.2 (a sparse choice on top), V4's layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from labkit.checkpoint.architectures import _activation, _decoder, _n_layers, _swiglu
from labkit.checkpoint.rope_settings import rope_from
from labkit.checkpoint.settings import Settings
from labkit.model.config import (
    FFN,
    CompressedAttention,
    Gate,
    Indexer,
    LatentAttention,
    Layer,
    ModelConfig,
    MoEFFN,
    Rope,
    RopeScaling,
    Streams,
)

MAX_HEADS = 65_536


def deepseek(family: str, settings: Settings) -> ModelConfig:
    """DeepSeek-V2 (arXiv 2405.04434), V3 (2412.19437) and V3.2 (2512.02556): MLA, the first layers dense."""
    n_layers = _n_layers(settings)
    attention = latent(family, settings)
    first_sparse = settings.count("first_k_dense_replace", 0, low=0)
    kinds = settings.per_layer("mlp_layer_types", n_layers)
    kinds = kinds or ["dense" if i < first_sparse else "sparse" for i in range(n_layers)]
    ffns: dict[str, FFN] = {}
    if "dense" in kinds:
        ffns["dense"] = _swiglu(settings)
    if "sparse" in kinds:
        ffns["sparse"] = experts(family, settings)
    if unknown := set(kinds) - {"dense", "sparse"}:
        raise ValueError(f"config: mlp_layer_types has {unknown.pop()!r}, but must be dense or sparse.")
    return _decoder(family, settings, tuple(Layer(attention, ffns[kind]) for kind in kinds))


def latent(family: str, settings: Settings) -> LatentAttention:
    """MLA's widths; in V3.2 with an indexer. The scale takes YaRN's temperature, squared: on both query and key."""
    d_rope = settings.count("qk_rope_head_dim")
    layout = "interleaved" if settings.flag("rope_interleave", True) else "half"
    d_nope, scale = settings.count("qk_nope_head_dim"), None
    spec = settings.table("rope_parameters") or settings.table("rope_scaling")
    mscale, factor = spec.get("mscale_all_dim"), float(spec.get("factor") or 1.0)
    if spec.get("rope_type", spec.get("type", "default")) != "default" and mscale and factor > 1:
        scale = (d_nope + d_rope) ** -0.5 * (0.1 * mscale * math.log(factor) + 1.0) ** 2
    indexer = None
    if family == "deepseek_v32":
        indexer = Indexer(
            settings.count("index_n_heads", high=MAX_HEADS),
            settings.count("index_head_dim"),
            settings.count("index_topk"),
        )
        if indexer.d_head < d_rope:
            raise ValueError(f"config: index_head_dim {indexer.d_head} is narrower than qk_rope_head_dim {d_rope}.")
    return LatentAttention(
        n_heads=settings.count("num_attention_heads", high=MAX_HEADS),
        d_nope=d_nope,
        d_rope=d_rope,
        d_value=settings.count("v_head_dim"),
        d_latent=settings.count("kv_lora_rank"),
        d_query=settings.optional_count("q_lora_rank"),
        rope=replace(rope_from(settings, d_rope), layout=layout),
        bias=settings.flag("attention_bias"),
        scale=scale,
        indexer=indexer,
    )


def experts(family: str, settings: Settings) -> MoEFFN:
    """V2 weighs by softmax and takes a group's best expert; V3 by sigmoid, with a bias and a group's best two."""
    n_experts, n_active = settings.count("n_routed_experts"), settings.count("num_experts_per_tok")
    n_groups, n_groups_active = settings.count("n_group", 1), settings.count("topk_group", 1)
    renormalize, scaling = settings.flag("norm_topk_prob"), settings.number("routed_scaling_factor")
    method = settings.get("topk_method", "noaux_tc" if family != "deepseek_v2" else "greedy")
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise ValueError(f"config: topk_method {method!r} is not supported: greedy, group_limited_greedy or noaux_tc.")
    if method == "greedy":
        n_groups = n_groups_active = 1
    if n_experts % n_groups or n_groups_active > n_groups:
        raise ValueError(f"config: {n_experts} experts in {n_groups} groups, {n_groups_active} of them active.")
    if n_active > n_experts // n_groups * n_groups_active:
        raise ValueError(f"config: {n_active} experts a token do not fit in {n_groups_active} of {n_groups} groups.")
    if family == "deepseek_v2":
        # V2's own code scales only where it does not renormalise.
        gate = Gate("softmax", False, n_groups, n_groups_active, 1, 1.0 if renormalize else scaling)
    else:
        gate = Gate("sigmoid", True, n_groups, n_groups_active, 2, scaling)
    d_ff = settings.count("moe_intermediate_size")
    return MoEFFN(
        n_experts,
        n_active,
        d_ff,
        _activation(settings, "hidden_act"),
        renormalize=renormalize,
        d_ff_shared=d_ff * settings.count("n_shared_experts", 0, low=0),
        gate=gate,
    )


def hybrid(family: str, settings: Settings) -> ModelConfig:
    """V4's pattern of window-only, CSA and HCA layers over a mixture of experts; with ``hc_mult`` its residual streams,
    with ``num_hash_layers`` the first layers' lookup. Its checkpoints, in fp4 and fp8, are not loaded."""
    n_layers = _n_layers(settings)
    ratios = settings.per_layer("compress_ratios", n_layers)
    if ratios is None or not all(isinstance(ratio, int) and ratio >= 0 for ratio in ratios):
        raise ValueError("config: compress_ratios must list one whole number a layer, 0 for a window alone.")
    least = min((ratio for ratio in ratios if ratio), default=0)  # CSA's: the checkpoints have 0, 4 and 128
    d_head, d_rope = settings.count("head_dim"), settings.count("qk_rope_head_dim")
    if d_rope > d_head or d_rope % 2:
        raise ValueError(f"config: qk_rope_head_dim {d_rope} must be even, and at most head_dim {d_head}.")
    scaling = RopeScaling("yarn", 16.0, 65_536, attention_factor=1.0)
    stretched = Rope(settings.number("compress_rope_theta", 160_000.0), "interleaved", d_rope, scaling)
    shared = {
        "n_heads": settings.count("num_attention_heads", high=MAX_HEADS),
        "d_head": d_head,
        "d_query": settings.count("q_lora_rank"),
        "window": settings.count("sliding_window"),
        "n_groups": settings.count("o_groups"),
        "d_group": settings.count("o_lora_rank"),
    }
    if shared["n_heads"] % shared["n_groups"]:
        raise ValueError(f"config: {shared['n_heads']} heads cannot be parted into o_groups {shared['n_groups']}.")
    kinds: dict[int, CompressedAttention] = {}
    for ratio in set(ratios):
        rope = stretched if ratio else Rope(settings.number("rope_theta"), "interleaved", d_rope)
        indexer = None
        if ratio and ratio == least:
            sizes = (settings.count(f"index_{key}") for key in ("n_heads", "head_dim", "topk"))
            indexer = Indexer(*sizes)
        kinds[ratio] = CompressedAttention(
            **shared, rope=rope, rate=ratio, overlap=indexer is not None, indexer=indexer
        )
    d_ff = settings.count("moe_intermediate_size")
    gate = Gate("sqrt_softplus", choice_bias=True, scaling=settings.number("routed_scaling_factor"))
    n_experts, n_active = settings.count("n_routed_experts"), settings.count("num_experts_per_tok")
    if n_active > n_experts:
        raise ValueError(f"config: {n_active} experts a token, but there are only {n_experts}.")
    limit = settings.optional_number("swiglu_limit")
    d_shared = d_ff * settings.count("n_shared_experts")
    ffn = MoEFFN(n_experts, n_active, d_ff, d_ff_shared=d_shared, gate=gate, limit=limit)
    looked_up = replace(ffn, gate=replace(gate, choice_bias=False), n_ids=settings.count("vocab_size"))
    n_looked_up, streams = settings.count("num_hash_layers", 0, low=0), None
    if n_streams := settings.count("hc_mult", 0, low=0):
        streams = Streams(n_streams, settings.count("hc_sinkhorn_iters", 20), settings.number("hc_eps", 1e-6))
    norms = "pre" if streams is None else "streams"
    if n_looked_up and streams is None:
        raise ValueError("config: num_hash_layers without hc_mult: V4 has both, and the lookup is built for streams.")
    layers = [Layer(kinds[ratio], looked_up if i < n_looked_up else ffn, norms) for i, ratio in enumerate(ratios)]
    return _decoder(family, settings, tuple(layers), streams=streams)


# --- V4's tensors -----------------------------------------------------------------------------------------


_V4_MODULES = {
    "q_a_proj.weight": "q_a_proj.weight",
    "q_a_norm.weight": "q_a_norm.weight",
    "q_b_proj.weight": "q_b_proj.weight",
    "kv_proj.weight": "kv_proj.weight",
    "kv_norm.weight": "kv_norm.weight",
    "o_b_proj.weight": "o_b_proj.weight",
    "sinks": "sinks",
    "compressor.indexer.q_b_proj.weight": "indexer.q_proj.weight",
    "compressor.indexer.scorer.weights_proj.weight": "indexer.weights_proj.weight",
    **{
        f"{theirs}.{their}": f"{ours}.{own}"
        for theirs, ours in (("compressor", "compressor"), ("compressor.indexer", "indexer.compressor"))
        for their, own in (
            ("kv_proj.weight", "kv"),
            ("gate_proj.weight", "gate"),
            ("position_bias", "position_bias"),
            ("kv_norm.weight", "norm.weight"),
        )
    },
}


def attention_tensors(
    attention: CompressedAttention, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one of transformers' ``deepseek_v4`` attentions, in labkit's words; others as they are."""
    for name, tensor in tensors.items():
        if name == "o_a_proj.weight":  # (groups width, n): each group's rows stand together
            yield "o_a", tensor.unflatten(0, (attention.n_groups, attention.d_group))
        else:
            yield _V4_MODULES.get(name, name), tensor
