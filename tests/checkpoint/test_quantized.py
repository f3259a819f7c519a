"""Calibrated models end to end on tiny ones: kept and found again, whole or not at all, and right by plain rounding."""

from __future__ import annotations

import pytest
import torch
from small_files import write_folder, write_gguf

import labkit
from labkit import registry
from labkit.checkpoint import calibrate, quantized
from labkit.kvcache.none import NoCache
from labkit.quant import AWQ, GPTQ, RTN, Grid, Int4, gptq
from labkit.quant.calibrated import fold, giver_of
from labkit.quant.format import linears_of
from tests.kernels.families import FAMILIES, random_model

IDS = [5, 77, 300, 12, 9]
TEXT = " ".join(f"{a} and {b} make {a * b}." for a in range(9) for b in range(9))
OPTIONS = {"device": "cpu", "dtype": "fp32", "backend": "reference"}


@pytest.fixture(autouse=True)
def one_thread():
    """Thousands of small operations: a second thread would only be waited for, on a busy machine for ever."""
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    return write_folder(tmp_path / "model")


SITES = (
    ["attention.q_proj", "attention.k_proj", "attention.v_proj"],
    ["attention.o_proj"],
    ["ffn.gate_proj", "ffn.up_proj"],
    ["ffn.down_proj"],
)


def load(folder, weights, **options):
    return labkit.load(str(folder), weights=weights, **{**OPTIONS, **options})


def kept(tmp_path):
    return sorted(p.name for p in (tmp_path / "cache" / "quantized").glob("[!.]*"))


METHODS = [GPTQ(3, 32, text=TEXT), AWQ(3, 64, text=TEXT), GPTQ(4, 128, "symmetric", True, text=TEXT)]


@pytest.mark.parametrize("config", METHODS, ids=repr)
def test_a_calibrated_model_is_kept_and_found_again(config, folder, tmp_path, monkeypatch):
    said = []
    first = load(folder, config, progress=lambda share, words: said.append((share, words)))
    assert "a layer" in said[0][1]  # how long, before it begins
    assert [share for share, _ in said] == [0.0, 0.0, 0.5, 1.0]
    (_name,) = kept(tmp_path)
    assert first.weights == config
    monkeypatch.setattr(calibrate, "walk", None)  # would raise: it is not needed again
    again = load(folder, config)
    assert torch.equal(first(IDS), again(IDS))
    assert not quantized.needs_calibration(str(folder), config)
    plain, rounded = load(folder, "plain"), load(folder, RTN(config.bits, config.group_size, config.kind))
    assert first.nbytes == rounded.nbytes < plain.nbytes / 3
    exact = plain(IDS)
    lost = (first(IDS) - exact).square().mean() / exact.var()
    assert 0 < float(lost) < 0.4


def test_a_gguf_file_and_a_random_shape_can_be_calibrated_too(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    config = GPTQ(4, 64, text=TEXT, n_tokens=512)
    path = write_gguf(tmp_path / "small.gguf")
    exact, found = load(path, "plain")(IDS), load(path, config)(IDS)
    assert 0 < float((found - exact).square().mean() / exact.var()) < 0.2
    assert len(kept(tmp_path)) == 1
    assert load(path, config).source == str(path)


def test_what_it_depends_on_is_in_the_name(folder):
    names = {
        quantized.folder_of(str(folder), c)
        for c in (GPTQ(), GPTQ(3), GPTQ(damping=0.02), GPTQ(text=TEXT), AWQ(), GPTQ(text=TEXT + "!"))
    }
    assert len(names) == 6
    before = quantized.folder_of(str(folder), GPTQ())
    write_folder(folder)
    assert quantized.folder_of(str(folder), GPTQ()) != before  # another file, another result


def test_cancelling_leaves_nothing(folder, tmp_path):
    class Stop(Exception):
        pass

    def stop(share, words):
        if share > 0:
            raise Stop

    with pytest.raises(Stop):
        load(folder, GPTQ(text=TEXT), progress=stop)
    assert kept(tmp_path) == []
    assert quantized.needs_calibration(str(folder), GPTQ(text=TEXT))


def test_bad_input_is_named_and_leaves_nothing(folder, tmp_path):
    with pytest.raises(ValueError, match="has 5 tokens: too short for a single sequence of 128"):
        load(folder, GPTQ(text="short"))
    with pytest.raises(ValueError, match=r"GPTQ\(bits=5\): choose one of 2, 3, 4, 8"):
        load(folder, GPTQ(5))
    assert kept(tmp_path) == []


def test_nothing_calibrates_for_a_forecast(monkeypatch):
    from labkit.model.config import DenseFFN, GroupedAttention, ModelConfig, Rope, uniform
    from labkit.perf import probe
    from labkit.perf.advice import _single_switches

    monkeypatch.setattr(calibrate, "walk", None)
    layers = uniform(1, GroupedAttention(2, 1, 32, rope=Rope()), DenseFFN(64))
    model = probe.build(ModelConfig("llama", 64, 64, 64, layers), probe.Engine(weights=GPTQ(3)))
    assert model.layers[0].ffn.up_proj.bits == 3
    offered = [c["weights"] for c in _single_switches(probe.Engine(weights="gptq-int4")) if "weights" in c]
    assert "int8" in offered
    assert not {"gptq-int4", "awq-int4", "int4", "stored", "packed"} & set(offered)


def test_gptq_beats_rounding_on_every_kind_of_linear(folder):
    model, config = load(folder, "plain"), GPTQ(3, 32, text=TEXT)
    windows = calibrate.windows_of(model.tokenizer, config, model.config)
    seen = {}

    def watch(idx, block, linears, sites):
        order = {name: gptq.order_of(site.hessian) for site in sites for name in site.names}
        for site in sites:
            for name in site.names:
                w, grid = linears[name].weight, Grid(3)
                found = gptq.round_columns(w, order[name], grid, 32).dequantize()
                lost, before = (
                    gptq.output_error(w, q, site.hessian) for q in (found, grid.nearest(w, 32).dequantize())
                )
                seen[idx, name] = lost / before

    calibrate.walk(model.transformer, config, windows, watch=watch)
    assert {name for _, name in seen} == {
        *(f"attention.{x}_proj" for x in "qkvo"),
        *(f"ffn.{x}_proj" for x in ("gate", "up", "down")),
    }
    assert max(seen.values()) < 0.9


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3", "olmo2"])
def test_folding_changes_nothing(family):
    """What AWQ multiplies into a weight and divides out before it cancels, in every layout of norms."""
    if family not in FAMILIES:
        pytest.skip(f"no {family} among the test families")
    model = random_model(FAMILIES[family])
    ids = torch.arange(12)

    def logits():
        return model(ids, NoCache(model.cache_entries, capacity_tokens=len(ids)))

    with torch.no_grad():
        before, folded = logits(), 0
        for block in model.layers:
            linears = dict(linears_of(block))
            for names in SITES:
                mine = [name for name in names if name in linears]
                giver = giver_of(block, mine)
                if giver is None:
                    continue
                scales = torch.rand(linears[mine[0]].in_features) + 0.5
                fold(giver, scales)
                for name in mine:
                    linears[name].weight.data.mul_(scales)
                folded += 1
        torch.testing.assert_close(logits(), before, rtol=1e-3, atol=1e-4)
        assert folded >= (1 if family == "olmo2" else 2)


def test_a_calibrated_default_name_is_the_default_config():
    assert registry.find("weights", "gptq-int4")[1] == GPTQ()
    assert GPTQ().form() == Int4(64)
