"""Weights kept as a GGUF file packs them: the same numbers, the file's own bytes, whatever the mixture of formats."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial

import gguf
import pytest
import torch
from small_files import write_gguf

import labkit
from labkit.backends import ReferenceStep, cuda_graph
from labkit.backends.cuda_graph import CudaGraph
from labkit.backends.unpacked import forget, unpacked
from labkit.checkpoint.notes import CheckpointWarning
from labkit.kvcache.contiguous import ContiguousCache
from labkit.perf.memory import weights_nbytes
from labkit.perf.timer import NULL_TIMER
from labkit.quant import Stored, StoredLinear, block_groups

IDS = [5, 77, 300, 12, 9]
PLAIN = ("F32", "F16", "BF16")


@pytest.fixture
def both(tmp_path):
    path = write_gguf(tmp_path / "mixed.gguf")
    options = {"device": "cpu", "dtype": "fp32", "backend": "reference"}
    return (labkit.load(path, weights=weights, **options) for weights in ("stored", "plain"))


def test_every_format_in_one_file(both, tmp_path):
    kept, plain = both
    assert isinstance(kept.weights, Stored)
    assert plain.weights is None
    torch.testing.assert_close(kept(IDS), plain(IDS), rtol=1e-5, atol=1e-5)
    packed = [m for m in kept.transformer.modules() if isinstance(m, StoredLinear)]
    assert {m.kind for m in packed} == {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K"}
    reader = gguf.GGUFReader(tmp_path / "mixed.gguf")
    in_file = sum(int(t.n_bytes) for t in reader.tensors if t.tensor_type.name not in PLAIN)
    in_float = sum(4 * int(t.n_elements) for t in reader.tensors if t.tensor_type.name in PLAIN)
    assert kept.nbytes == in_file + in_float
    assert weights_nbytes(kept.config, dtype="fp32", weights=kept.weights) == kept.nbytes


def test_the_bytes_are_predicted_once_panels_hold_the_blocks(both):
    kept, _ = both
    as_blocks = kept.nbytes
    packed = [m for m in kept.transformer.modules() if isinstance(m, StoredLinear)]
    for module in packed:
        module.panels()
    assert kept.nbytes > as_blocks  # the scales of Q4_K and Q6_K are products: float32
    assert weights_nbytes(kept.config, dtype="fp32", weights=kept.weights.compiled()) == kept.nbytes


def test_rows_of_q_and_k_change_places_packed(both):
    """llama.cpp stores them in pairs: packed or not, they must come out in the same order."""
    kept, plain = both
    for block, other in zip(kept.transformer.layers, plain.transformer.layers, strict=True):
        for name in ("q_proj", "k_proj"):
            one, two = getattr(block.attention, name), getattr(other.attention, name)
            dense = one.dequantize() if isinstance(one, StoredLinear) else one.weight
            assert torch.equal(dense, two.weight)


def test_a_file_with_a_damaged_block_is_refused(tmp_path):
    path = write_gguf(tmp_path / "mixed.gguf")
    reader = gguf.GGUFReader(path)
    tensor = next(t for t in reader.tensors if t.tensor_type.name == "Q5_1")
    data = bytearray(path.read_bytes())
    data[tensor.data_offset : tensor.data_offset + 2] = b"\x00\x7c"  # float16 infinity
    path.write_bytes(data)
    with pytest.raises(ValueError, match="1 packed tensors have scales that are NaN or infinite: layers"):
        labkit.load(path, weights="stored", device="cpu")


def test_the_default_model_in_its_own_bytes(default_model):
    kept = labkit.load(dtype="fp32", device="cpu")
    assert kept.weights == "stored"
    assert abs(kept.nbytes / 98_362_432 - 1) < 0.02  # the file holds a vocabulary as well
    ids = kept.tokenizer.encode("The bytes in memory are the bytes of the file.")
    torch.testing.assert_close(kept(ids), default_model(ids), rtol=1e-4, atol=1e-4)


@pytest.fixture
def path(tmp_path):
    return write_gguf(tmp_path / "mixed.gguf")


@pytest.fixture
def noted():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", CheckpointWarning)
        yield found


def test_blocks_are_kept_where_nobody_chooses(path, noted):
    model = labkit.load(path, device="cpu", dtype="bf16")
    assert isinstance(model.weights, Stored)
    assert not noted


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"backend": "reference"}, "the reference backend has no product of them"),
        ({"dtype": "fp16"}, "does not compute in fp16"),
    ],
)
def test_blocks_are_unpacked_where_the_backend_has_no_product(path, noted, options, reason):
    model = labkit.load(path, device="cpu", **options)
    assert model.weights is None
    assert reason in str(noted[0].message)
    assert len(noted) == 1


def test_on_a_gpu_blocks_are_kept_where_triton_computes_from_them(path, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed (Linux only)")
    config = labkit.load(path, device="cpu", weights="plain").config
    ask = partial(CudaGraph().why_unpack, device=torch.device("cuda"), dtype=torch.float16)
    monkeypatch.setattr(cuda_graph, "why_not", lambda: None)  # as if there were a GPU
    assert ask(config) is None
    assert "does not know this model" in str(ask(replace(config, learned_positions=True)))
    assert "the model is on cpu" in str(CudaGraph().why_unpack(config, device=torch.device("cpu"), dtype=torch.float16))
    monkeypatch.setattr(cuda_graph, "why_not", lambda: "it needs Triton")
    assert "no Triton" in str(ask(config))


def test_a_format_without_a_kernel_is_unpacked_alone(path, noted, monkeypatch):
    monkeypatch.delitem(block_groups._PARTS, "Q5_1")
    model = labkit.load(path, device="cpu", dtype="fp32")
    kinds = {model.weights.layers, model.weights.head, *(kind for _, kind in model.weights.others)}
    assert "plain" in kinds
    assert "Q5_1" not in kinds
    assert "Q5_0" in kinds
    assert "packs matrices as Q5_1 (" in str(noted[0].message)
    assert "unpacked into fp32" in str(noted[0].message)
    plain = labkit.load(path, device="cpu", dtype="fp32", weights="plain")
    torch.testing.assert_close(model(IDS), plain(IDS), rtol=1e-5, atol=1e-5)


def test_plain_pytorch_serves_unpacked_while_the_kernels_are_compiled(path):
    model = labkit.load(path, device="cpu", dtype="fp32", weights="stored")
    other = unpacked(model.transformer)
    assert not any(isinstance(m, StoredLinear) for m in [other.head, *other.layers.modules()])
    assert any(isinstance(m, StoredLinear) for m in model.transformer.layers.modules())
    cache = ContiguousCache(other.cache_entries, capacity_tokens=8, dtype=torch.float32)
    with torch.inference_mode():
        step = ReferenceStep(other, cache)
        found = step(torch.tensor(IDS), rows="all", timer=NULL_TIMER, should_stop=lambda: False)
    torch.testing.assert_close(found, model(IDS), rtol=1e-5, atol=1e-5)
    assert unpacked(model.transformer) is other
    forget(model.transformer)
    assert unpacked(model.transformer) is not other
    plain = labkit.load(path, device="cpu", dtype="fp32", weights="plain").transformer
    assert unpacked(plain) is plain
