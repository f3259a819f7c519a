"""The figures of the V4 report and its articles, recomputed, and the formulas against what real caches allocate."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from labkit.checkpoint.catalogue import shape
from labkit.kvcache.contiguous import ContiguousCache
from labkit.kvcache.parts import ROLLBACK_TOKENS
from labkit.model.attention import entries_of
from labkit.model.config import (
    CompressedAttention,
    DenseFFN,
    GroupedAttention,
    Indexer,
    LatentAttention,
    ModelConfig,
    Rope,
    uniform,
)
from labkit.perf import cost, formats
from labkit.perf.attention_cost import attention_work, rows_seen
from labkit.perf.long_context import cache_nbytes, decode_flops, grouped_like
from labkit.perf.weights import n_parameters, weights_of
from labkit.quant import Int8, size
from tests.perf.families import random_model

S = 1 << 20
GIB = 1 << 30
V32, PRO, FLASH = "deepseek-v3.2", "deepseek-v4-pro", "deepseek-v4-flash"

TURNED = Rope(1e4, "interleaved", 8)
V4 = {"n_heads": 4, "d_head": 16, "d_query": 24, "window": 6, "n_groups": 2, "d_group": 12, "rope": TURNED}
KINDS = {
    "mla": LatentAttention(4, 12, 8, 16, 24, rope=Rope(1e4, "interleaved"), bias=True),
    "dsa": LatentAttention(4, 12, 8, 16, 24, d_query=20, rope=Rope(1e4, "interleaved"), indexer=Indexer(3, 16, 5)),
    "window": CompressedAttention(**V4),
    "csa": CompressedAttention(**V4, rate=4, overlap=True, indexer=Indexer(3, 8, 3)),
    "hca": CompressedAttention(**V4, rate=8),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def small(kind: str) -> ModelConfig:
    return ModelConfig("test", 96, 32, 64, uniform(2, KINDS[kind], DenseFFN(48)), tied_embeddings=False)


def test_bytes_of_a_million_tokens_in_bf16():
    v32, pro = cache_nbytes(shape(V32), S), cache_nbytes(shape(PRO), S)
    assert v32 == 61 * S * 1408
    assert pro == 30 * ((128 + S / 4) * 1024 + S / 4 * 256) + 31 * (128 + S / 128) * 1024
    assert v32 / GIB == pytest.approx(83.88, abs=0.01)
    assert pro / GIB == pytest.approx(9.62, abs=0.01)
    assert v32 / pro == pytest.approx(8.7, abs=0.05)


def test_bytes_of_a_million_tokens_in_low_precision():
    v32, pro, flash = (cache_nbytes(shape(name), S, low_precision=True) for name in (V32, PRO, FLASH))
    assert v32 == 61 * S * 788
    assert pro == 30 * ((128 + S / 4) * 584 + S / 4 * 68) + 31 * (128 + S / 128) * 584
    assert (v32 / 1e9, pro / 1e9, flash / 1e9) == pytest.approx((50.40, 5.28, 3.69), abs=0.005)
    assert (v32 / pro, v32 / flash) == pytest.approx((9.55, 13.67), abs=0.01)
    assert (pro / v32, flash / v32) == pytest.approx((0.105, 0.073), abs=0.001)
    assert cache_nbytes(shape(PRO), S) / pro == pytest.approx(1.957, abs=0.001)
    assert pro / (S * grouped_like(shape(PRO))) == pytest.approx(0.0202, abs=0.0001)


def test_flops_of_a_token_after_a_million():
    plain = [sum(decode_flops(shape(name), S).values()) for name in (V32, PRO, FLASH)]
    assert [flops / 1e12 for flops in plain] == pytest.approx([1.158, 0.303, 0.140], abs=0.001)
    assert [flops / plain[0] for flops in plain[1:]] == pytest.approx([0.262, 0.121], abs=0.001)
    weighted = [sum(decode_flops(shape(name), S, weighted=True).values()) for name in (V32, PRO, FLASH)]
    assert [round(100 * flops / weighted[0]) for flops in weighted[1:]] == [27, 10]


def test_the_shapes_have_the_published_parameters():
    counts = [n_parameters(shape(name)) / 1e9 for name in (V32, PRO, FLASH)]
    assert counts == pytest.approx([671, 1600, 284], rel=0.02)
    layers = [layer.attention for layer in shape(PRO).layers]
    assert [sum(a.rate == rate for a in layers) for rate in (4, 128, 0)] == [30, 31, 0]
    layers = [layer.attention for layer in shape(FLASH).layers]
    assert [sum(a.rate == rate for a in layers) for rate in (4, 128, 0)] == [21, 20, 2]


@pytest.mark.parametrize("name", [V32, PRO, FLASH])
def test_the_formula_is_what_a_cache_allocates(name):
    """A real cache for a million tokens, on the device that has no memory. What the formula leaves out, by hand."""
    config = shape(name)
    cache = ContiguousCache(
        [entries_of(layer.attention) for layer in config.layers],
        capacity_tokens=S,
        dtype=torch.bfloat16,
        device="meta",
    )
    beyond = 0
    for layer in config.layers:
        attention = layer.attention
        if isinstance(attention, CompressedAttention):
            beyond += ROLLBACK_TOKENS * 2 * attention.d_head
            n_open = attention.rate * (2 if attention.overlap else 1)
            widths = [attention.d_head] * bool(attention.rate) + [i.d_head for i in [attention.indexer] if i]
            for width in widths:
                beyond += (n_open + ROLLBACK_TOKENS) * 2 * width * (2 if attention.overlap else 1) * 4
    assert cache.nbytes == cache_nbytes(config, S) + beyond
    assert cache.nbytes == formats.cache_nbytes(config, n_tokens=S, dtype="bf16")
    assert beyond < 0.01 * cache.nbytes


@every_kind
def test_weights_and_their_bytes_are_the_models_own(kind):
    config = small(kind)
    model = random_model(config)
    assert {w.name: w.shape for w in weights_of(config)} == {
        name: tuple(t.shape) for name, t in model.state_dict().items()
    }
    assert sum(formats.weight_nbytes(w, dtype="fp32") for w in weights_of(config)) == model.nbytes
    from labkit import registry

    component, options = registry.find("weights", "int8")
    packed = component.build(options, transformer=model)
    assert packed.nbytes == size.predict_nbytes(config, Int8())


@every_kind
@pytest.mark.parametrize("n_past", [0, 2, 23, 31])
def test_flops_of_a_decode_step_equal_torchs_counter(kind, n_past):
    """Every product of a step of one token: at its start, inside a block, and where it closes one."""
    config = small(kind)
    model = random_model(config)
    cache = ContiguousCache(model.cache_entries, capacity_tokens=40)
    counter = FlopCounterMode(display=False)
    with torch.no_grad():
        if n_past:
            model(torch.arange(n_past), cache)
        with counter:
            model(torch.tensor([3]), cache)
    expected = cost.step_cost(config, n_past=n_past).total.flops
    indexer = KINDS[kind].indexer
    rate = getattr(KINDS[kind], "rate", 1)
    if indexer is not None:  # each head's score is weighted and added: 2 H a row, which no count of products has
        n_rows = (n_past + 1) // rate
        idle = n_rows <= indexer.top_k  # nothing to choose: labkit does not score
        expected += 2 * (-2 * indexer.n_heads * indexer.d_head * n_rows if idle else 2 * indexer.n_heads * n_rows)
    assert counter.get_total_flops() == expected


def test_rows_seen_equal_a_count():
    for n in (0, 1, 7, 40):
        for rate in (1, 4, 8):
            for cap in (None, 0, 1, 3, 100):
                wanted = sum(t // rate if cap is None else min(t // rate, cap) for t in range(1, n + 1))
                assert rows_seen(n, rate, cap) == wanted


def test_what_a_step_reads_and_writes_by_hand():
    """CSA after 23 tokens: the 24th closes block 5. Rows of 16 and 8 numbers, open ones of 2 x 32 and 2 x 16."""
    work = attention_work(KINDS["csa"], n_new=1, n_past=23, dtype="bf16")
    assert work.write_bytes == 2 * 16 + 2 * 16 + 2 * 8 + 4 * 64 + 4 * 32
    assert work.read_bytes == 6 * 32 + 3 * 32 + 6 * 16 + 4 * 64 + 4 * 32


def test_grouped_attention_has_no_low_precision_layout():
    config = ModelConfig("llama", 96, 32, 64, uniform(2, GroupedAttention(4, 2, 8, rope=Rope()), DenseFFN(48)))
    with pytest.raises(ValueError, match="no low-precision layout"):
        cache_nbytes(config, 100, low_precision=True)
    assert cache_nbytes(config, 100) == formats.cache_nbytes(config, n_tokens=100, dtype="bf16")
