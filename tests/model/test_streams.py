"""V4 as a whole equals transformers' ``deepseek_v4``: residual streams, looked-up experts, limits and all."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import labkit
from labkit.kvcache.contiguous import ContiguousCache
from labkit.model import ModelConfig, Transformer
from labkit.model.config import Gate, Layer, MoEFFN, Norm, Streams
from labkit.model.streams import doubly_stochastic
from tests.model.families import close
from tests.model.v4 import D_MODEL, KINDS, layer_config, settings, theirs

pytest.importorskip("transformers", reason="transformers is the oracle")
LIMIT = 0.05  # low enough to cut


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@cache
def whole() -> Transformer:
    """labkit's model with the weights of transformers' whole one."""
    from labkit.checkpoint.deepseek import attention_tensors

    spec, gate = settings(), Gate("sqrt_softplus", choice_bias=True, scaling=1.5)
    chosen = MoEFFN(4, 2, 16, d_ff_shared=16, gate=gate, limit=LIMIT)
    looked_up = MoEFFN(4, 2, 16, d_ff_shared=16, gate=Gate("sqrt_softplus", scaling=1.5), n_ids=96, limit=LIMIT)
    layers = tuple(
        Layer(layer_config(kind), looked_up if i == 0 else chosen, "streams") for i, kind in enumerate(KINDS)
    )
    norm, streams = Norm(eps=1e-6), Streams(4)
    config = ModelConfig(
        "v4_hybrid", spec["vocab_size"], D_MODEL, 64, layers, norm, tied_embeddings=False, streams=streams
    )
    model, other = Transformer(config), oracle()
    named = {
        "embedding.weight": other.model.embed_tokens.weight,
        "final_norm.weight": other.model.norm.weight,
        "head.weight": other.lm_head.weight,
        "confluence.weight": other.model.hc_head.hc_fn,
        "confluence.base": other.model.hc_head.hc_base,
        "confluence.scale": other.model.hc_head.hc_scale,
    }
    for i, (layer, own) in enumerate(zip(other.model.layers, layers, strict=True)):
        at, mlp = f"layers.{i}.", layer.mlp
        tensors = attention_tensors(own.attention, layer.self_attn.state_dict())
        named |= {f"{at}attention.{name}": tensor for name, tensor in tensors}
        for ours, mix in (("attention_mix", layer.attn_hc), ("ffn_mix", layer.ffn_hc)):
            named |= {f"{at}{ours}.weight": mix.fn, f"{at}{ours}.base": mix.base, f"{at}{ours}.scale": mix.scale}
        named[f"{at}attention_norm.weight"] = layer.input_layernorm.weight
        named[f"{at}ffn_norm.weight"] = layer.post_attention_layernorm.weight
        named[f"{at}ffn.router.weight"] = mlp.gate.weight
        gate_proj, up_proj = mlp.experts.gate_up_proj.chunk(2, dim=1)
        named |= {f"{at}ffn.experts.gate": gate_proj, f"{at}ffn.experts.up": up_proj}
        named[f"{at}ffn.experts.down"] = mlp.experts.down_proj
        named |= {f"{at}ffn.shared.{name}": tensor for name, tensor in mlp.shared_experts.state_dict().items()}
        if i == 0:
            named[f"{at}ffn.experts_of_id"] = mlp.gate.tid2eid
        else:
            named[f"{at}ffn.choice_bias"] = mlp.gate.e_score_correction_bias
    model.load_state_dict(named)
    return model


@cache
def oracle():
    model = theirs()
    generator = torch.Generator().manual_seed(3)
    for layer in model.model.layers:
        layer.mlp.experts.limit = layer.mlp.shared_experts.limit = LIMIT
    table = model.model.layers[0].mlp.gate.tid2eid
    table.copy_(torch.rand(len(table), 4, generator=generator).argsort(1)[:, :2])
    return model


@pytest.mark.parametrize("chunk", [40, 7, 1])
def test_logits_equal_transformers(chunk):
    ids = torch.randint(96, (40,), generator=torch.Generator().manual_seed(1))
    want = oracle()(ids[None], use_cache=False).logits[0]
    cache = ContiguousCache(whole().cache_entries, capacity_tokens=64)
    close(torch.cat([whole()(piece, cache) for piece in ids.split(chunk)]), want)


def test_the_limit_cuts():
    """The test above would not see a limit that nothing reaches."""
    ids = torch.arange(40)
    before = whole()(ids, ContiguousCache(whole().cache_entries, capacity_tokens=64))
    experts = [layer.ffn.experts for layer in whole().layers]
    try:
        for module in experts:
            module.limit = None
        after = whole()(ids, ContiguousCache(whole().cache_entries, capacity_tokens=64))
    finally:
        for module in experts:
            module.limit = LIMIT
    assert float((before - after).abs().max()) > 1e-4


def test_rows_and_columns_sum_to_one():
    mix = doubly_stochastic(torch.rand(5, 4, 4, generator=torch.Generator().manual_seed(0)) + 0.01, Streams(4))
    for dim in (-1, -2):
        torch.testing.assert_close(mix.sum(dim), torch.ones(5, 4), atol=1e-4, rtol=0)


def test_the_tiny_hybrid_has_all_of_it():
    config = labkit.load("random:tiny-hybrid").config
    assert config.streams == Streams(4)
    assert [bool(layer.ffn.n_ids) for layer in config.layers] == [True, False, False, False, False]
    assert {layer.norms for layer in config.layers} == {"streams"}


def test_a_layer_of_streams_needs_streams():
    ffn = MoEFFN(4, 2, 16)
    with pytest.raises(ValueError, match=r"give ModelConfig streams=Streams\(4\)"):
        Transformer(ModelConfig("x", 96, D_MODEL, 64, (Layer(layer_config("hca"), ffn, "streams"),)))
