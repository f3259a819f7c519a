"""What fits: against the model's own bytes, and by hand arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

import labkit.quant  # noqa: F401 - registers the packed forms
from labkit import registry
from labkit.model.config import DenseFFN, GroupedAttention, ModelConfig, MoEFFN, Rope, uniform
from labkit.perf import memory
from tests.perf.families import random_model
from tests.perf.test_cost import LLAMA2_7B, SMOLLM2

GB = 10**9


def packable(tied: bool, ffn: Any = None) -> ModelConfig:
    """Widths that every group size divides."""
    attention = GroupedAttention(4, 2, 32, rope=Rope(), qkv_bias=True)
    layers = uniform(2, attention, ffn or DenseFFN(256))
    return ModelConfig("llama", 192, 128, 64, layers, tied_embeddings=tied)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("ffn", [None, MoEFFN(4, 2, 128, d_ff_shared=128, shared_gate=True)], ids=["dense", "moe"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_bytes_equal_the_loaded_models(weights: str | None, tied: bool, ffn: Any, dtype: str) -> None:
    from labkit.model.config import as_dtype

    config = packable(tied, ffn)
    model: Any = random_model(config, as_dtype(dtype))
    if weights is not None:
        component, options = registry.find("weights", weights)
        model = component.build(options, transformer=model)
    assert memory.weights_nbytes(config, dtype=dtype, weights=weights) == model.nbytes


def test_article_sizes_of_a_7b() -> None:
    """facts: 6,738,415,616 parameters are 26.95 and 13.48 GB."""
    assert memory.weights_nbytes(LLAMA2_7B, dtype="fp32") / GB == pytest.approx(26.95, abs=0.005)
    assert memory.weights_nbytes(LLAMA2_7B, dtype="fp16") / GB == pytest.approx(13.48, abs=0.005)
    int8 = memory.weights_nbytes(LLAMA2_7B, dtype="fp16", weights="int8") / GB
    int4 = memory.weights_nbytes(LLAMA2_7B, dtype="fp16", weights="int4") / GB
    assert 6.74 < int8 < 7.0
    assert 3.37 < int4 < 4.1


def test_users_by_hand() -> None:
    """Llama-2-7B in fp16: 524,288 bytes a token; (80e9 - 13.48e9) / (4096 * 524288) = 30.98."""
    assert memory.users(LLAMA2_7B, memory_bytes=80 * GB, n_tokens=4096, dtype="fp16") == 30
    assert memory.users(LLAMA2_7B, memory_bytes=10 * GB, n_tokens=4096, dtype="fp16") == 0
    with pytest.raises(ValueError, match="any number of users"):
        memory.users(LLAMA2_7B, memory_bytes=80 * GB, n_tokens=4096, kv_cache="none")


def test_users_grow_when_their_context_shrinks() -> None:
    counts = [memory.users(SMOLLM2, memory_bytes=2 * GB, n_tokens=n, dtype="bf16") for n in (512, 2048, 8192)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 4 * counts[2]


def test_a_model_that_fits() -> None:
    fit = memory.fits(SMOLLM2, free_bytes=4 * GB)
    assert fit
    assert fit.remedy is None
    fit.require()


def test_a_model_that_does_not_fit_says_which_switch_would_help() -> None:
    fit = memory.fits(LLAMA2_7B, free_bytes=20 * GB, dtype="fp32")
    assert not fit
    assert fit.remedy is not None
    assert memory.memory_of(LLAMA2_7B, fit.remedy).total_bytes <= 20 * GB
    with pytest.raises(MemoryError, match=r"needs .* of weights.*It fits with dtype='bf16'"):
        fit.require()


def test_packed_weights_are_offered_when_half_the_bytes_are_not_enough() -> None:
    fit = memory.fits(LLAMA2_7B, free_bytes=11 * GB, dtype="bf16")
    assert fit.remedy is not None
    assert fit.remedy.weights == "int8"
    tighter = memory.fits(LLAMA2_7B, free_bytes=6 * GB, dtype="bf16")
    assert tighter.remedy is not None
    assert tighter.remedy.weights == "int4"


def test_nothing_helps() -> None:
    fit = memory.fits(LLAMA2_7B, free_bytes=1 * GB)
    assert fit.remedy is None
    with pytest.raises(MemoryError, match="choose a smaller model"):
        fit.require()


def test_the_device_is_asked_when_nothing_is_said() -> None:
    assert memory.fits(packable(True)).free_bytes > 0
