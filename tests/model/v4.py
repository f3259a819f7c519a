"""Tiny layers of DeepSeek-V3.2's and V4's attention: transformers' module, and labkit's with the same weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from labkit.kvcache.contiguous import ContiguousCache
from labkit.model.attention import build_attention, entries_of
from labkit.model.config import CompressedAttention, Indexer, Norm, Rope, RopeScaling
from labkit.model.step import Step
from tests.model.families import randomize

D_MODEL, WINDOW, RATE, HEAVY = 32, 6, 4, 8
KINDS = {
    "window": "sliding_attention",
    "csa": "compressed_sparse_attention",
    "hca": "heavily_compressed_attention",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0}


def settings(top_k: int = 3) -> dict[str, Any]:
    """A small config in transformers' words: three kinds of layer, the first with looked-up experts."""
    return {
        "vocab_size": 96,
        "hidden_size": D_MODEL,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 16,
        "q_lora_rank": 20,
        "qk_rope_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 12,
        "sliding_window": WINDOW,
        "index_n_heads": 16,  # with few, ReLU leaves rows whose scores are all 0, and a tie falls either way
        "index_head_dim": 16,
        "index_topk": top_k,
        "layer_types": list(KINDS.values()),
        "compress_rates": {"compressed_sparse_attention": RATE, "heavily_compressed_attention": HEAVY},
        "rope_parameters": dict(YARN),
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "max_position_embeddings": 64,
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    }


@cache
def theirs(top_k: int = 3) -> Any:
    """transformers' whole model; its layers' ``self_attn`` are the oracles."""
    import transformers

    config = transformers.AutoConfig.for_model("deepseek_v4", **settings(top_k))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomize(model, seed=5)
    return model


def layer_config(kind: str, top_k: int = 3) -> CompressedAttention:
    """labkit's config of one layer, written out: the translation from config.json has tests of its own."""
    scaling = RopeScaling("yarn", 4.0, 16, beta_fast=4.0, beta_slow=1.0, attention_factor=1.0)
    plain, stretched = Rope(1e4, "interleaved", 8), Rope(160_000.0, "interleaved", 8, scaling)
    variant = {
        "window": {"rope": plain},
        "csa": {"rope": stretched, "rate": RATE, "overlap": True, "indexer": Indexer(16, 16, top_k)},
        "hca": {"rope": stretched, "rate": HEAVY},
    }[kind]
    return CompressedAttention(4, 16, 20, WINDOW, 2, 12, **variant)


@cache
def ours(kind: str, top_k: int = 3) -> Any:
    """labkit's module with the weights of transformers' layer of that kind."""
    from labkit.checkpoint.deepseek import attention_tensors

    module = build_attention(D_MODEL, layer_config(kind, top_k), Norm(eps=1e-6))
    attention = theirs(top_k).model.layers[list(KINDS).index(kind)].self_attn
    module.load_state_dict(dict(attention_tensors(layer_config(kind, top_k), attention.state_dict())))
    return module


def new_cache(kind: str, *, top_k: int = 3, capacity_tokens: int = 64, n_sequences: int = 1) -> ContiguousCache:
    layer = entries_of(layer_config(kind, top_k))
    return ContiguousCache([layer], capacity_tokens=capacity_tokens, n_sequences=n_sequences)


def run(module: Any, x: torch.Tensor, cache: Any, counts: Any = None, *, commit: bool = True) -> torch.Tensor:
    """One step of labkit's module: x (T, M) -> (T, M)."""
    cache.open(len(x) if counts is None else counts)
    out = module(x, Step(cache), 0)
    if commit:
        cache.commit()
    return out


def oracle(kind: str, x: torch.Tensor, *, top_k: int = 3, chunks: tuple[int, ...] = ()) -> torch.Tensor:
    """transformers' module over one sequence x (T, M), whole, or in ``chunks`` through its own cache."""
    from transformers import DynamicCache
    from transformers.masking_utils import create_sliding_window_causal_mask

    model = theirs(top_k).model
    layer_idx = list(KINDS).index(kind)
    past = DynamicCache(config=model.config) if chunks else None
    outs, start = [], 0
    for n in chunks or (len(x),):
        piece = x[None, start : start + n]
        at = torch.arange(start, start + n)[None]
        mask = create_sliding_window_causal_mask(
            config=model.config, inputs_embeds=piece, attention_mask=None, cache=past, position_ids=at
        )
        angles = {name: model.rotary_emb(piece, position_ids=at, layer_type=name) for name in ("main", "compress")}
        attention = model.layers[layer_idx].self_attn
        outs.append(attention(piece, angles, at, mask, cache=past)[0][0])
        if past is not None:  # the mask of the next chunk asks the first layer how much there is
            for other in range(len(model.layers)):
                if other != layer_idx:
                    filler = torch.zeros(1, 1, n, 16)
                    past.update(filler, filler, other)
        start += n
    return torch.cat(outs)


def hidden(n_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n_tokens, D_MODEL, generator=torch.Generator().manual_seed(seed))
