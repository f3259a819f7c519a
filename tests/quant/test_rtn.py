"""Quantising a whole model: bytes as predicted, every linear replaced, the tied head shared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from labkit import registry
from labkit.model import ModelConfig, Transformer
from labkit.model.config import DenseFFN, GroupedAttention, MoEFFN, Norm, Rope, uniform
from labkit.quant import Int4, Int4Linear, Int8, Int8Linear, predict_nbytes

CONFIGS = [Int8(), Int4(32), Int4(64, symmetric=True), Int4(32, head="int4")]


def shapes() -> dict[str, ModelConfig]:
    attention = GroupedAttention(4, 2, 32, rope=Rope())
    biased = GroupedAttention(4, 4, 32, qkv_bias=True, out_bias=True, qk_norm="head")
    full = GroupedAttention(4, 2, 32, rope=Rope(), qk_norm="full")
    return {
        "llama": ModelConfig("llama", 99, 64, 128, uniform(2, attention, DenseFFN(192))),
        "untied": ModelConfig("llama", 99, 64, 128, uniform(1, full, DenseFFN(192), "sandwich"), tied_embeddings=False),
        "gpt2": ModelConfig(
            "gpt2", 99, 64, 128, uniform(2, biased, DenseFFN(256, "gelu", gated=False, bias=True)),
            norm=Norm("layer", bias=True), learned_positions=True,
        ),
        "mixture": ModelConfig(
            "moe", 99, 64, 128, uniform(1, attention, MoEFFN(4, 2, 64, d_ff_shared=64, shared_gate=True))
        ),
    }  # fmt: skip


def random_model(config: ModelConfig) -> Transformer:
    torch.manual_seed(0)
    transformer = Transformer(config)
    for parameter in transformer.parameters():
        parameter.normal_(0, 0.1)
    return transformer


def quantize(transformer, config):
    component, config = registry.find("weights", config)
    return component.build(config, transformer=transformer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("shape", shapes())
def test_bytes_are_as_predicted(shape, config, dtype):
    model_config = shapes()[shape]
    transformer = quantize(random_model(model_config).to(dtype), config)
    assert transformer.nbytes == predict_nbytes(model_config, config, dtype=dtype)
    assert transformer.dtype == dtype


def test_every_linear_is_packed_and_a_tied_head_is_shared():
    transformer = quantize(random_model(shapes()["llama"]), Int4(32))
    kinds = {type(m) for m in transformer.layers.modules() if isinstance(m, (nn.Linear, Int8Linear, Int4Linear))}
    assert kinds == {Int4Linear}
    assert type(transformer.head) is Int8Linear
    assert transformer.embedding.head is transformer.head


def test_routers_stay_as_they_are():
    transformer = quantize(random_model(shapes()["mixture"]), Int8())
    assert type(transformer.layers[0].ffn.router) is nn.Linear
    assert type(transformer.layers[0].ffn.shared.up_proj) is Int8Linear


@pytest.mark.parametrize(("config", "bound"), [(Int8(), 0.03), (Int4(32), 0.4)], ids=repr)
def test_logits_stay_close(config, bound):
    """8 bits move the logits by a few hundredths of their spread, 4 bits by a few tenths."""
    from labkit.kvcache.contiguous import ContiguousCache

    model_config = shapes()["llama"]
    exact, packed = random_model(model_config), quantize(random_model(model_config), config)
    ids = torch.arange(20)
    with torch.inference_mode():
        a, b = (t(ids, ContiguousCache(t.cache_entries, capacity_tokens=20)) for t in (exact, packed))
    error = ((a - b).square().mean().sqrt() / a.std()).item()
    assert 0 < error < bound


def test_an_option_out_of_range_is_named():
    with pytest.raises(ValueError, match="group_size=48"):
        registry.find("weights", Int4(48))
