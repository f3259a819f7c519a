"""Costs against reality: bytes against the tensors, FLOPs against torch's own counter, figures against the papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from labkit.kvcache.contiguous import ContiguousCache
from labkit.kvcache.none import NoCache
from labkit.model.config import DenseFFN, GroupedAttention, ModelConfig, Rope, as_dtype, uniform
from labkit.perf import attention_cost, cost, formats
from labkit.perf.weights import n_parameters, weights_of
from tests.perf.families import FAMILIES, random_model

SMOLLM2 = ModelConfig(
    "llama", 49_152, 576, 8192, uniform(30, GroupedAttention(9, 3, 64, rope=Rope(100_000.0)), DenseFFN(1536))
)
LLAMA2_7B = ModelConfig(
    "llama",
    32_000,
    4096,
    4096,
    uniform(32, GroupedAttention(32, 32, 128, rope=Rope()), DenseFFN(11_008)),
    tied_embeddings=False,
)
LLAMA_13B = ModelConfig(
    "llama",
    32_000,
    5120,
    2048,
    uniform(40, GroupedAttention(40, 40, 128, rope=Rope()), DenseFFN(13_824)),
    tied_embeddings=False,
)


@pytest.fixture(params=FAMILIES)
def config(request: Any) -> ModelConfig:
    return FAMILIES[request.param]


def counted_flops(model: Any, cache: Any, counts: Any, n_rows: int) -> int:
    """What torch's counter sees; the plain SDPA, because the counter does not know the fused CPU kernel."""
    ids = torch.arange(n_rows) % 90
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter, sdpa_kernel(SDPBackend.MATH):
        model(ids, cache, counts=counts, rows="last")
    return counter.get_total_flops()


def new_cache(model: Any, *, n_tokens: int, n_sequences: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    return ContiguousCache(model.cache_entries, capacity_tokens=n_tokens, n_sequences=n_sequences, dtype=dtype)


def test_weights_are_the_models_own(config: ModelConfig) -> None:
    with torch.device("meta"):
        from labkit.model.transformer import Transformer

        state = Transformer(config).state_dict()
    assert {w.name: w.shape for w in weights_of(config)} == {name: tuple(t.shape) for name, t in state.items()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_weight_bytes_equal_the_tensors(config: ModelConfig, dtype: str) -> None:
    model = random_model(config, as_dtype(dtype))
    assert sum(formats.weight_nbytes(w, dtype=dtype) for w in weights_of(config)) == model.nbytes


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("n_sequences", [1, 3])
def test_cache_bytes_equal_the_tensors(config: ModelConfig, dtype: str, n_sequences: int) -> None:
    model = random_model(config, as_dtype(dtype))
    cache = new_cache(model, n_tokens=40, n_sequences=n_sequences, dtype=as_dtype(dtype))
    predicted = formats.cache_nbytes(config, n_tokens=40, n_sequences=n_sequences, dtype=dtype)
    assert predicted == cache.nbytes


@pytest.mark.parametrize(("n_past", "n_new"), [(2, 1), (0, 7), (0, 20), (5, 1), (20, 1), (20, 6)])
def test_flops_equal_torchs_counter(config: ModelConfig, n_past: int, n_new: int) -> None:
    model = random_model(config)
    cache = new_cache(model, n_tokens=40)
    if n_past:
        with torch.no_grad():
            model(torch.arange(n_past) % 90, cache)
    counted = counted_flops(model, cache, None, n_new)
    assert cost.step_cost(config, n_new=n_new, n_past=n_past, full_square=True).total.flops == counted


def test_flops_of_a_batch_equal_torchs_counter(config: ModelConfig) -> None:
    model = random_model(config)
    cache = new_cache(model, n_tokens=20, n_sequences=3)
    with torch.no_grad():
        model(torch.arange(30) % 90, cache, counts={0: 10, 1: 10, 2: 10})
    counted = counted_flops(model, cache, {0: 1, 1: 1, 2: 1}, 3)
    assert cost.step_cost(config, n_past=10, n_sequences=3, full_square=True).total.flops == counted


def test_without_a_cache_a_decode_step_is_a_prefill(config: ModelConfig) -> None:
    model = random_model(config)
    cache = NoCache(model.cache_entries, capacity_tokens=12)
    step = cost.decode_cost(config, 11, kv_cache="none", full_square=True)
    assert step.total.flops == counted_flops(model, cache, None, 12)
    assert step.total.kv_read_bytes == step.total.kv_write_bytes == 0


@pytest.mark.parametrize(("window", "n_sinks"), [(None, 0), (4, 0), (4, 2), (1, 3), (50, 2)])
def test_pairs_seen_equal_the_mask(window: int | None, n_sinks: int) -> None:
    from labkit.kernels.ops import visible

    layer = formats.sight(GroupedAttention(1, 1, 8, window=window, n_sinks=n_sinks))
    for n_past, n_new in ((0, 1), (0, 13), (6, 1), (3, 9)):
        mask = visible(
            torch.arange(n_past, n_past + n_new), torch.arange(n_past + n_new), window=window, n_sinks=n_sinks
        )
        assert attention_cost.seen(layer, n_new, n_past) == int(mask.sum())
        assert attention_cost.reach(layer, n_new, n_past) >= int(mask.any(0).sum())


def test_layers_and_ends_add_up_to_the_total(config: ModelConfig) -> None:
    step = cost.step_cost(config, n_new=5, n_past=3, n_sequences=2)
    phases = step.phases
    final_norm = sum(w.n_values * 4 for w in weights_of(config) if w.name.startswith("final_norm"))
    inside = sum(step.layers, cost.Cost())
    assert inside.flops == pytest.approx(step.total.flops - phases["lm_head"].flops)
    ends = phases["lm_head"].bytes + phases["embed"].bytes + final_norm
    assert inside.bytes == pytest.approx(step.total.bytes - ends)


def test_a_decode_step_streams_every_weight_but_an_untied_embedding() -> None:
    streamed = cost.decode_cost(LLAMA2_7B, 1, dtype="fp16").total.weight_bytes
    stored = 2 * n_parameters(LLAMA2_7B)
    assert streamed == stored - 2 * (32_000 - 1) * 4096


def test_experts_read_are_the_expected_number() -> None:
    """E (1 - (1 - k/E)^T) experts, against a simulation of uniform routing."""
    config = FAMILIES["mixtral"]
    experts = [w for w in weights_of(config) if w.kind == "expert"]
    dense = sum(4 * w.n_values for w in weights_of(config) if w.phase == "ffn" and w.kind != "expert")
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 4, 30):
        picks = torch.rand((4000, rows, 8), generator=generator).topk(2, dim=-1).indices
        hit = torch.zeros((4000, 8)).scatter(1, picks.flatten(1), 1.0).mean().item()
        predicted = cost.step_cost(config, n_new=rows).phases["ffn"].weight_bytes
        assert predicted == pytest.approx(dense + hit * sum(4 * w.n_values for w in experts), rel=0.02)


def test_published_figures() -> None:
    """The article's claims, with the exact values behind its rounded ones."""
    assert formats.cache_nbytes(LLAMA_13B, n_tokens=1, dtype="fp16") == 819_200
    assert formats.cache_nbytes(SMOLLM2, n_tokens=1, dtype="fp16") == 23_040
    assert n_parameters(LLAMA2_7B) == 6_738_415_616
    assert n_parameters(SMOLLM2) == 134_515_008
    step = cost.decode_cost(LLAMA2_7B, 0, dtype="fp16").total
    assert step.flops / 2 == pytest.approx(6.607e9, rel=1e-3)  # the parameters without the input embedding


@pytest.mark.parametrize("counts", [{"n_new": 0}, {"n_past": -1}, {"n_sequences": 0}])
def test_impossible_counts(counts: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        cost.step_cost(SMOLLM2, **counts)


def test_an_unknown_cache_lists_the_kinds() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        cost.step_cost(SMOLLM2, kv_cache="nope")
